"""The dataflow server: tasks, leases, groups, admission, batches and versions over Redis."""
