"""Fixtures shared by the contract tests."""

from support.dataflow_fixtures import redis_url, valkey, world

__all__ = ["redis_url", "valkey", "world"]
