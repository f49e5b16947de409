"""Skipping what is solved."""

from dataclasses import replace

from astraflow.plugins import PluginState, TaskSpec
from astraflow_dataflow.plugins.curators.skip_solved import SkipSolved
from support.groups import group


def test_a_problem_is_skipped_from_the_threshold_on_and_comes_back_below_it() -> None:
    curator, task = SkipSolved(PluginState(), threshold=0.5, memory=0.5), TaskSpec("t", ())
    averages = []
    # 0 → 0.5·0 + 0.5·0.5 = 0.25 → 0.625 → 0.3125; rewards of 0 are not solved, the group of two is half solved.
    for rewards in [(1.0, 0.0), (1.0, 2.0), (0.0, -1.0)]:
        curator.observe(group(*rewards))
        averages.append(bool(curator.propose([task])))
    assert averages == [True, False, True]


def test_the_published_settings_need_29_solved_groups() -> None:
    # 1 − 0.9ⁿ ≥ 0.95 from n = 29 on (0.9²⁸ = 0.0523, 0.9²⁹ = 0.0471).
    curator, task = SkipSolved(PluginState()), TaskSpec("t", ())
    for number in range(1, 30):
        curator.observe(group(1.0, 1.0))
        assert bool(curator.propose([task])) == (number < 29)


def test_a_long_memory_gets_there_as_well() -> None:
    # 1 − 0.999ⁿ ≥ 0.97 from n = 3,505 on: what is kept of an average must not be too coarse to move.
    curator, task = SkipSolved(PluginState(), memory=0.999, threshold=0.97), TaskSpec("t", ())
    for _ in range(3504):
        curator.observe(group(1.0))
    assert curator.propose([task])
    for _ in range(10):
        curator.observe(group(1.0))
    assert not curator.propose([task])


def test_a_problem_is_known_again_under_another_task_id() -> None:
    curator = SkipSolved(PluginState(), memory=0.0, problem="id")
    first, again, other = (TaskSpec(name, (), data={"id": name[0]}) for name in ("a1", "a2", "b1"))
    curator.observe(replace(group(1.0), task=first))
    assert curator.propose([first, again, other]) == [other]
