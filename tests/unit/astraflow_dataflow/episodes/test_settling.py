"""Telling curators of settled groups without ever waiting for them."""

import asyncio
from types import SimpleNamespace

from astraflow_dataflow.episodes.settling import inform_curators
from astraflow_dataflow.runs.data_plugins import DataPlugin, DataPlugins
from support.groups import group


def test_groups_wait_with_their_verdicts_and_those_beyond_the_bound_are_a_fault() -> None:
    plugins = DataPlugins(dataset=None, unobserved=asyncio.Queue(2))  # type: ignore[arg-type]
    context = SimpleNamespace(plugins=plugins)
    inform_curators(context, [group(1.0)], ["ready"])  # type: ignore[arg-type]
    assert plugins.unobserved.empty()
    plugins.curators = (DataPlugin(kind="curator", name="m:Slow", made=None),)  # type: ignore[arg-type]
    inform_curators(context, [group(1.0)] * 3, ["ready"] * 3)  # type: ignore[arg-type]
    assert [plugins.unobserved.get_nowait().verdict for _ in range(2)] == ["ready", "ready"]
    (fault,) = plugins.faults.all()
    assert (fault.name, fault.count) == ("m:Slow", 1)
    assert "2 groups wait for `observe`" in fault.problem
