"""Generated contracts: see proto/astraflow/keda."""
