"""Fixtures of tests that start nodes: a tiny policy, and one engine for all nodes of a file."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.engine_process import running_engine
from support.node_process import tiny_policy


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random policy with a tokenizer."""
    return tiny_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def shared_engine(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of an engine that somebody else runs; nodes use it one after the other."""
    with running_engine(checkpoint, folder=tmp_path_factory.mktemp("engine")) as engine:
        yield engine.url
