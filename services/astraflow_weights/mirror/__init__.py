"""A node's copy of one policy's weights: followed, changed in place, repaired."""
