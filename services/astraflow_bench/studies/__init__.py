"""Studies: what the system claims, run again over seeds and arms on the real services."""
