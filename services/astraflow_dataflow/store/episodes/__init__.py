"""Episodes in Redis: their commits, the groups that they complete, and what waits to be archived."""
