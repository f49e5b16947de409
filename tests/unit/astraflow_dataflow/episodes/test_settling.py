"""Telling curators of settled groups without ever waiting for them."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

from astraflow_dataflow.episodes.settling import tell_curators
from astraflow_dataflow.records import GroupVerdict
from astraflow_dataflow.runs.data_plugins import DataPlugin, DataPlugins
from support.groups import group

READY = GroupVerdict(
    group_id="t/p",
    policy_id="p",
    verdict="ready",
    judged=True,
    oldest_version=0,
    reward_sum=1.0,
    items=b"",
    trajectory_ids=("a",),
)


def test_groups_wait_with_their_verdicts_and_those_beyond_the_bound_are_a_fault() -> None:
    plugins = DataPlugins(dataset=None, unobserved=asyncio.Queue(2))  # type: ignore[arg-type]
    context = SimpleNamespace(plugins=plugins)
    tell_curators(context, [group(1.0)], [READY])  # type: ignore[arg-type]
    assert plugins.unobserved.empty()
    plugins.curators = (DataPlugin(kind="curator", name="m:Slow", made=None),)  # type: ignore[arg-type]
    tell_curators(context, [group(1.0)] * 3, [READY] * 3)  # type: ignore[arg-type]
    assert [plugins.unobserved.get_nowait().verdict for _ in range(2)] == ["ready", "ready"]
    (fault,) = plugins.faults.all()
    assert (fault.name, fault.count) == ("m:Slow", 1)
    assert "2 groups wait for `observe`" in fault.problem
