"""From a trainer's model to a committed version, and what is made behind it: merged deltas, snapshots, rollbacks."""
