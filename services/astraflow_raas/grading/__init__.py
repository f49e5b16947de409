"""Where the recipe's reward runs: in the event loop, or in worker processes that are watched, limited and replaced."""
