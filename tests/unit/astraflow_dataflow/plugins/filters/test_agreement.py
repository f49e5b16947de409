"""The filter on how far engines and trainers disagree, by hand."""

import pytest

from astraflow.plugins import (
    Group,
    MeasuredStep,
    MeasuredTrajectory,
    PluginState,
    TaskSpec,
    TrajectorySummary,
)
from astraflow_dataflow.plugins.filters import agreement
from astraflow_dataflow.plugins.filters.agreement import Agreement


def group(*nodes: str, source: str = "", version: int = 0, policy: str = "p") -> Group:
    """A group with an episode of each of these nodes."""
    made = [TrajectorySummary(reward=0.0, node_id=node, max_version=version) for node in nodes]
    return Group(task=TaskSpec("t", (), source=source), trajectories=tuple(made), policy=policy)


def step(number: int, *found: float, node: str = "n", source: str = "", version: int = 0) -> MeasuredStep:
    """A step whose trajectories, all of one node, source and version, had these divergences."""
    made = [
        MeasuredTrajectory(mismatch_kl=value, node_id=node, source=source, version=version) for value in found
    ]
    return MeasuredStep(policy="p", step=number, trajectories=made)


def test_a_group_is_judged_by_what_was_trained_on_of_its_node() -> None:
    state = PluginState()
    keep = Agreement(state, highest=0.1, memory=0.5, least=2)
    kept = []
    # 0.04 → 0.5·0.04 + 0.5·0.20 = 0.12 → 0.5·0.12 + 0.5·0.06 = 0.09.
    for number, found in enumerate([(0.02, 0.06), (0.2, 0.2), (0.06, 0.06)], start=1):
        keep.measured(step(number, *found))
        kept.append(keep(group("n", "n")))
    assert kept == [True, False, True]
    assert [value[:2] for value in state.values() if isinstance(value, list)] == [[6, 0.09]]


def test_the_averages_of_a_groups_nodes_are_averaged_and_unknown_ones_say_nothing() -> None:
    keep = Agreement(PluginState(), highest=0.1, least=1)
    keep.measured(step(1, 0.3, node="bad"))
    keep.measured(step(2, 0.02, node="good"))
    # (0.3 + 0.02 + 0.02) / 3 = 0.113, (0.3 + 3 · 0.02) / 4 = 0.09.
    assert not keep(group("bad", "good", "good"))
    assert keep(group("bad", "good", "good", "good"))
    assert not keep(group("bad", "new", "new", "new"))
    assert keep(group("new"))
    assert keep(group("bad", policy="another"))


def test_too_few_trajectories_say_nothing() -> None:
    keep = Agreement(PluginState(), highest=0.1, least=3)
    keep.measured(step(1, 9.0, 9.0))
    assert keep(group("n"))
    keep.measured(step(2, 9.0))
    assert not keep(group("n"))


@pytest.mark.parametrize(
    ("by", "judged"),
    [
        (("node",), {"node": "n"}),
        (("source",), {"source": "math"}),
        (("version",), {"version": 7}),
        (("node", "source"), {"node": "n", "source": "math"}),
    ],
)
def test_averages_are_by_node_source_and_version_as_asked(
    by: tuple[agreement.By, ...], judged: dict[str, str | int]
) -> None:
    keep = Agreement(PluginState(), by=by, least=1)
    keep.measured(step(1, 1.0, node="n", source="math", version=7))

    def of(node: str = "x", source: str = "y", version: int = 0) -> Group:
        return group(node, source=source, version=version)

    assert not keep(of(**judged))  # type: ignore[arg-type]
    for name in judged:
        assert keep(of(**{key: value for key, value in judged.items() if key != name}))  # type: ignore[arg-type]


def test_every_so_many_groups_one_is_kept_so_that_a_node_can_come_back() -> None:
    keep = Agreement(PluginState(), least=1, memory=0.0, probe_every=3)
    keep.measured(step(1, 1.0))
    assert [keep(group("n")) for _ in range(7)] == [False, False, True, False, False, True, False]
    keep.measured(step(2, 0.01))
    assert keep(group("n"))


def test_a_step_that_is_told_again_counts_once() -> None:
    state = PluginState()
    keep = Agreement(state, memory=0.5)
    keep.measured(step(1, 0.2))
    keep.measured(step(2, 0.4))
    before = dict(state)
    for number in (1, 2):
        keep.measured(step(number, 9.0))
    assert dict(state) == before


def test_what_was_not_measured_for_longest_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "_MOST_AVERAGES", 5)
    keep = Agreement(PluginState(), by=("version",), least=1)
    for number in range(1, 6):
        keep.measured(step(number, 1.0, version=number))
    # Five versions and the step are six: the older half of the five goes.
    assert [keep(group("n", version=number)) for number in range(1, 6)] == [True, True, False, False, False]
