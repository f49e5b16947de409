"""What log entries say by reference: digests of tensors, and the schema."""
