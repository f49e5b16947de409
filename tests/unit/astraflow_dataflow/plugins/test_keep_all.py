"""The filter that filters nothing."""

from __future__ import annotations

from astraflow_dataflow.plugins.keep_all import KeepAll


def test_every_group_is_kept() -> None:
    assert KeepAll()([1.0, 1.0])
    assert KeepAll()([])
