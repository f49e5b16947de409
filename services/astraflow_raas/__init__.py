"""A rollout node: leases tasks, runs workflows against an engine, pushes episodes and follows versions."""
