"""Generated contracts: see proto/astraflow/rollout."""
