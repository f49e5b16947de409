"""Generated contracts: see proto/astraflow/options."""
