"""The active runs of this process: which there are, with what recipe and which wake-ups."""
