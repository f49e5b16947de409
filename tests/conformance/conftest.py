"""Fixtures of the conformance suite: a Valkey for its dataflow servers."""

import pytest

from support.dataflow_fixtures import process, redis_url, valkey, world
from support.valkey import server_binary

__all__ = ["process", "redis_url", "valkey", "world"]


@pytest.fixture(scope="session")
def redis_binary() -> str:
    """One Redis is enough: clients do not see which one it is."""
    return server_binary()
