"""Generated contracts: see proto/astraflow/raas."""
