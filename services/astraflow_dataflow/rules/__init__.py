"""Pure rules: what a group, a task, a trajectory, the staleness window and a wait are. No clock, no store."""
