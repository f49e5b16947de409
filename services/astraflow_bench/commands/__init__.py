"""`astraflow bench` and its commands."""
