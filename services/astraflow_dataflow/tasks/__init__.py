"""Before rollout: tasks are drawn from data sets, leased to nodes and their work sessions kept."""
