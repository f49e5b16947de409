"""Ready groups are bound into the batch of a step, leased and acked."""
