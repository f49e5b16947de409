"""One tile: the grid of a tensor, and a tile as delta or snapshot."""
