"""The filter that filters nothing."""

from astraflow_dataflow.plugins.keep_all import KeepAll
from support.groups import group


def test_every_group_is_kept() -> None:
    assert KeepAll()(group(1.0, 1.0))
    assert KeepAll()(group(0.0))
