"""Where runs live: all in one Redis, or each on one primary of a cluster, which is the same to whoever asks."""
