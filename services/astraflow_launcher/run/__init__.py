"""A development run: its folder, its processes, the Redis it brings."""
