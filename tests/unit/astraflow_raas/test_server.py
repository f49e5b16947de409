"""The watch over a node that has started: what it sees once, and what it does then."""

import gc
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from astraflow_kit.metrics import Metrics
from astraflow_raas import server


@pytest.fixture
def nothing_frozen() -> Iterator[None]:
    gc.unfreeze()
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("nothing_frozen")
def test_what_starting_has_loaded_is_no_more_searched_for_garbage_once_the_node_works() -> None:
    node: Any = SimpleNamespace(
        waiting_for="weights", worker=SimpleNamespace(num_held=0), pusher=SimpleNamespace(num_kept=0)
    )
    watch = server._Watch(node, Metrics(), server="here", server_gone_timeout_s=0.0)
    watch._look(1.0)
    assert gc.get_freeze_count() == 0
    node.waiting_for = ""
    watch._look(2.0)
    assert gc.get_freeze_count() > 1000
