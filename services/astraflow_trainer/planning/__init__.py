"""How much memory training takes, before anything is loaded."""
