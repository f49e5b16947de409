"""Generated contracts: see proto/astraflow/server."""
