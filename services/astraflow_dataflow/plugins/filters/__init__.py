"""Ready-made filters: they decide after rollout which groups are trained on."""
