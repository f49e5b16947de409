"""Fixtures shared by the integration tests."""

from support.dataflow_fixtures import redis_url, valkey, world

__all__ = ["redis_url", "valkey", "world"]
