"""Shares of pass-rate buckets."""

from dataclasses import replace

import pytest

from astraflow.plugins import PluginState, TaskSpec
from astraflow_dataflow.plugins.curators.pass_rate_buckets import PassRateBuckets
from support.groups import group


def tasks(problem: str, count: int = 2000) -> list[TaskSpec]:
    return [TaskSpec(f"{problem}{number}", (), data={"problem": problem}) for number in range(count)]


@pytest.mark.parametrize(
    ("rewards", "share"),
    [([], 1.0), ([0, 0, 0, 0], 0.25), ([1, 0, 0, 0], 0.5), ([1, 1, 0, 0], 1.0), ([1, 1, 1, 1], 0.0)],
)
def test_each_bucket_has_its_share(rewards: list[float], share: float) -> None:
    curator = PassRateBuckets(PluginState(), seed=0, edges=(0.1, 0.5, 0.9), shares=(0.25, 0.5, 1.0, 0.0))
    if rewards:
        curator.observe(replace(group(*rewards), task=tasks("p")[0]))
    assert len(curator.propose(tasks("p"))) / 2000 == pytest.approx(share, abs=0.03)
    assert len(curator.propose(tasks("new"))) == 2000


def test_the_pass_rate_moves_and_so_does_the_bucket() -> None:
    state = PluginState()
    curator = PassRateBuckets(state, seed=0, edges=(0.3,), shares=(0.0, 1.0), memory=0.5)
    wanted = []
    # 0, then 0.5·0 + 0.5·0.5 = 0.25, then 0.625.
    for rewards in [(0, 0), (1, 0), (1, 1)]:
        curator.observe(replace(group(*rewards), task=tasks("p")[0]))
        wanted.append(len(curator.propose(tasks("p", 3))))
    assert wanted == [0, 0, 3]
    assert list(state.values()) == [0.625]


@pytest.mark.parametrize(("edges", "shares"), [((0.5,), (1.0,)), ((0.5, 0.5), (1.0, 1.0, 1.0))])
def test_edges_that_make_no_buckets_are_refused(edges: tuple[float, ...], shares: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="must ascend and make"):
        PassRateBuckets(PluginState(), seed=0, edges=edges, shares=shares)
