"""Generated contracts: see proto/astraflow/weights."""
