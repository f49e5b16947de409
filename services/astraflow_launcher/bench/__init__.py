"""`astraflow bench`: measurements that a reader can repeat on their own machine."""
