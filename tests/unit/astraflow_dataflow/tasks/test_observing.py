"""Telling curators of groups."""

from astraflow.plugins import Group
from astraflow_dataflow.rules.faults import PluginFaults
from astraflow_dataflow.runs.data_plugins import DataPlugin
from astraflow_dataflow.tasks.observing import observe
from support.groups import group


def test_a_group_on_which_a_curator_fails_is_left_out_and_the_next_is_observed() -> None:
    seen: list[str] = []

    class Raising:
        def observe(self, group: Group) -> None:
            if group.verdict == "filtered":
                raise ValueError("no signal")
            seen.append(group.verdict)

    faults = PluginFaults()
    curator = DataPlugin(kind="curator", name="m:Curator", made=Raising())
    observe(curator, [group(1.0, verdict=verdict) for verdict in ("filtered", "ready")], faults)  # type: ignore[arg-type]
    assert seen == ["ready"]
    assert faults.all()[0].problem.startswith("ValueError: no signal (test_observing.py:")
