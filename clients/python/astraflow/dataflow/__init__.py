"""Generated contracts: see proto/astraflow/dataflow."""
