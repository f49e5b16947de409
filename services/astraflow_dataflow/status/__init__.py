"""What people read: the status of a run, why it waits, the trace of a task, the report of a pool."""
