"""The trainer: consumes batches bound to its steps and publishes weight versions."""
