"""Ready-made curators: they decide before rollout which tasks are worth the tokens."""
