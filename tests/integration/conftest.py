"""Fixtures shared by the integration tests."""

from support.dataflow_fixtures import own_valkey, redis_binary, redis_url, valkey, world

__all__ = ["own_valkey", "redis_binary", "redis_url", "valkey", "world"]
