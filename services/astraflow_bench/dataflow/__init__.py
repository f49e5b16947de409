"""What the data plane costs: pushes, batches, leases, streams, and how that grows."""
