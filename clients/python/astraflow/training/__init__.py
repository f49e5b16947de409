"""What a trainer does at the server: `claimed`, `accepting`."""
