"""AdaRFT's curriculum."""

import pytest

from astraflow.plugins import PluginState, TaskSpec
from astraflow_dataflow.plugins.curators.difficulty_curriculum import DifficultyCurriculum
from astraflow_dataflow.plugins.curators.problems import PATIENCE
from support.groups import group


def task(difficulty: float, number: int = 0) -> TaskSpec:
    return TaskSpec(f"{difficulty}/{number}", (), data={"difficulty": difficulty})


def test_the_difficulty_moves_by_the_formula_and_stays_within_its_bounds() -> None:
    state = PluginState()
    curator = DifficultyCurriculum(state, groups=2)
    # R = 1: 0 + 50·tanh(2·0.5) = 38.08; R = 0.75: + 50·tanh(0.5) = 61.19; R = 1 twice: over 100, so 100.
    for rewards, asked in [((1, 1), 38.0797), ((1, 0), 61.1856), ((1, 1), 99.2653), ((1, 1), 100.0)]:
        curator.observe(group(1.0, 1.0))
        curator.observe(group(*rewards))
        assert state["difficulty"] == pytest.approx(asked, abs=1e-3)


def test_only_tasks_near_it_are_proposed() -> None:
    curator = DifficultyCurriculum(PluginState({"difficulty": b"40"}), width=5)
    assert curator.propose([task(34), task(35), task(45), task(46)]) == [task(35), task(45)]


def test_a_run_whose_tasks_are_all_far_away_does_not_stand_still() -> None:
    curator = DifficultyCurriculum(PluginState())
    drawn = [task(90, number) for number in range(PATIENCE + 5)]
    assert curator.propose(drawn) == [drawn[PATIENCE]]


def test_a_task_without_a_difficulty_is_named() -> None:
    with pytest.raises(KeyError, match="difficulty"):
        DifficultyCurriculum(PluginState()).propose([TaskSpec("t", ())])
