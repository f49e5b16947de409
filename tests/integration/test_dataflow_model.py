"""Two servers over one Redis answer as a model of a few lines does, whatever comes in whatever order."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import Phase

from support.dataflow_machine import compare
from support.dataflow_tour import tour
from support.planted_bugs import QUICK
from support.valkey import ValkeyServer


@pytest.fixture
def quick_valkey(redis_binary: str, tmp_path: Path) -> Iterator[ValkeyServer]:
    """A server of its own that does not wait for a busy disk: here nothing is about what survives."""
    with ValkeyServer(tmp_path / "own", binary=redis_binary, options=QUICK) as server:
        yield server


def test_servers_answer_as_the_model_does_to_each_call_once(
    quick_valkey: ValkeyServer, tmp_path: Path
) -> None:
    tour(quick_valkey.url, tmp_path)


@pytest.mark.timeout(300)
def test_servers_answer_as_the_model_does(quick_valkey: ValkeyServer, tmp_path: Path) -> None:
    compare(quick_valkey.url, tmp_path, examples=15, calls=60)


@pytest.mark.ci
@pytest.mark.timeout(300)
def test_so_they_do_with_payloads_outside(quick_valkey: ValkeyServer, tmp_path: Path) -> None:
    url, payloads = quick_valkey.url, f"file://{tmp_path}/payloads"
    compare(url, tmp_path, examples=10, calls=60, phases=[Phase.generate], payloads=payloads)


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_so_they_do_over_many_calls(quick_valkey: ValkeyServer, tmp_path: Path) -> None:
    compare(quick_valkey.url, tmp_path, examples=1500, calls=100)
