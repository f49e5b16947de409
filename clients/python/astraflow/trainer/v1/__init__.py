"""Generated contracts: see proto/astraflow/trainer."""
