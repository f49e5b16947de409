"""GRESO against its definition."""

from dataclasses import replace
from itertools import pairwise

import pytest

from astraflow.plugins import Group, PluginState, TaskSpec, TrajectorySummary
from astraflow_dataflow.plugins.curators.greso import Greso
from astraflow_dataflow.plugins.curators.problems import PATIENCE

EASY, HARD, MIXED = (1.0, 1.0), (0.0, 0.0), (0.0, 1.0)


def task(number: int, *, problem: str = "p") -> TaskSpec:
    return TaskSpec(f"t{number}", (), data={"problem": problem})


def observed(curator: Greso, *rewards: float, version: int = 0, problem: str = "p") -> None:
    """Let it observe a group of a problem."""
    made = tuple(TrajectorySummary(reward=reward, max_version=version) for reward in rewards)
    curator.observe(Group(task=task(0, problem=problem), trajectories=made))


def proposed(curator: Greso, count: int, *, problem: str = "p") -> float:
    """The share of tasks of a problem that it proposes."""
    return len(curator.propose([task(number, problem=problem) for number in range(count)])) / count


@pytest.mark.parametrize(
    ("groups", "probability"),
    [
        ([], 1.0),
        ([EASY], 0.5),
        ([EASY, EASY], 0.25),
        ([EASY, EASY, EASY], 0.125),
        # 0.5⁴ = 0.0625 is below the floor of easy ones.
        ([EASY] * 4, 0.1),
        # 0.5² = 0.25 is below the floor of hard ones.
        ([HARD, HARD], 0.4),
        # Another kind begins a streak of one; a group that taught something ends any.
        ([HARD, HARD, EASY], 0.5),
        ([EASY, EASY, MIXED], 1.0),
    ],
)
def test_a_problem_is_proposed_by_its_streak(groups: list[tuple[float, ...]], probability: float) -> None:
    curator = Greso(PluginState(), seed=7)
    for rewards in groups:
        observed(curator, *rewards)
    assert proposed(curator, 4000) == pytest.approx(probability, abs=0.025)
    assert proposed(curator, 400, problem="another") == 1.0


def test_bases_follow_the_share_of_a_versions_groups() -> None:
    state = PluginState()
    curator = Greso(state, seed=0, warmup_tasks=0)
    # Version 0: 1 of 10 groups is easy (0.1 ≥ 0.083: down), 1 is hard (0.1 < 0.167: up).
    for number, rewards in enumerate([EASY, HARD, *[MIXED] * 8]):
        observed(curator, *rewards, problem=str(number))
    assert "bases" not in state
    # Version 1 begins; it has no group of equal rewards, so that both bases rise when version 2 begins.
    observed(curator, *MIXED, version=1)
    assert state["bases"] == {"easy": 0.49, "hard": 0.51}
    observed(curator, *MIXED, version=2)
    assert state["bases"] == {"easy": 0.5, "hard": 0.52}


def test_bases_stay_until_an_epoch_was_drawn_after_a_version_was_trained() -> None:
    state = PluginState()
    curator = Greso(state, seed=0, tasks_per_epoch=10)
    draw = iter(range(1000))

    def drawn(count: int) -> None:
        tasks = [task(next(draw), problem="new") for _ in range(count)]
        assert curator.propose(tasks) == curator.propose(tasks), "asked twice, they count once"

    drawn(30)
    observed(curator, *EASY)
    drawn(30)  # of version 0 only: what nodes run ahead before the first step is not of the epoch
    observed(curator, *EASY, version=1)
    drawn(9)
    observed(curator, *EASY, version=2)
    assert "bases" not in state
    drawn(1)
    observed(curator, *EASY, version=3)
    assert state["bases"] == {"easy": 0.49, "hard": 0.51}


def test_the_warmup_survives_a_killed_server_and_may_be_set() -> None:
    state = PluginState()
    for version in range(2):
        curator = Greso(state, seed=0, tasks_per_epoch=10, warmup_tasks=4)
        observed(curator, *MIXED, version=version)
        curator.propose([task(10 * version + number) for number in range(4)])
    assert "bases" not in state
    observed(Greso(state, seed=0, warmup_tasks=4), *MIXED, version=2)
    assert state["bases"] == {"easy": 0.51, "hard": 0.51}


def test_bases_stay_for_ever_where_no_epoch_is_known() -> None:
    state = PluginState()
    curator = Greso(state, seed=0)
    for version in range(9):
        observed(curator, *EASY, version=version)
        proposed(curator, 100, problem="new")
    assert "bases" not in state


def test_bases_stay_within_their_bounds() -> None:
    state = PluginState()
    curator = Greso(state, seed=0, change=0.4, warmup_tasks=0)
    for version in range(4):
        observed(curator, *EASY, version=version)
    assert state["bases"] == {"easy": 0.01, "hard": 0.99}


def test_after_enough_skipped_ones_a_task_is_taken() -> None:
    curator = Greso(PluginState(), seed=1, easy_floor=0.0)
    for _ in range(40):
        observed(curator, *EASY)
    # 0.5⁴⁰ is never drawn. Patience goes on over calls of any size, and not over repeated ones.
    taken = []
    for start in range(0, 4 * PATIENCE, 64):
        tasks = [task(number) for number in range(start, start + 64)]
        assert curator.propose(tasks) == curator.propose(tasks)
        taken += [int(item.task_id[1:]) for item in curator.propose(tasks)]
    assert taken[0] == PATIENCE
    assert {after - before for before, after in pairwise(taken)} == {PATIENCE + 1}


def test_equal_seeds_draw_alike_and_others_do_not() -> None:
    draws = []
    for seed in (3, 3, 4):
        curator = Greso(PluginState(), seed)
        observed(curator, *EASY)
        draws.append([item.task_id for item in curator.propose([task(number) for number in range(100)])])
    assert draws[0] == draws[1] != draws[2]


def test_groups_of_one_and_of_other_roles_teach_nothing() -> None:
    state = PluginState()
    curator = Greso(state, seed=0, role="coder")
    observed(curator, *EASY)
    Greso(state, seed=0).observe(Group(task=task(0), trajectories=(TrajectorySummary(reward=1.0),)))
    assert dict(state) == {}


def test_problems_of_two_sources_may_have_equal_names() -> None:
    curator = Greso(PluginState(), seed=0, easy_floor=0.0)
    for _ in range(60):
        observed(curator, *EASY)
    other = [replace(task(number), source="another") for number in range(100)]
    assert curator.propose(other) == other
    assert curator.propose([task(number) for number in range(100)]) == []
