"""Fixtures shared by the integration tests."""

from support.dataflow_fixtures import own_valkey, process, redis_binary, redis_url, valkey, world
from support.node_fixtures import checkpoint, shared_engine

__all__ = [
    "checkpoint",
    "own_valkey",
    "process",
    "redis_binary",
    "redis_url",
    "shared_engine",
    "valkey",
    "world",
]
