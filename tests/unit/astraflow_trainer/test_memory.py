"""Keeping freed memory is a request to the allocator that may be declined."""

import sys

import pytest

from astraflow_kit import allocator
from astraflow_trainer import memory


def test_another_platform_declines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocator.sys, "platform", "darwin")
    assert not memory.keep_freed_memory()


@pytest.mark.skipif(sys.platform != "linux", reason="mallopt is glibc's")
def test_glibc_agrees_more_than_once() -> None:
    assert memory.keep_freed_memory() == memory.keep_freed_memory()
