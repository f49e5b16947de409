"""Pools of nodes follow the target of their run: asking for it, and what can resize a pool."""
