"""What `commit` is sent: whoever is alike comes together, and what was sent is read again."""

from collections.abc import Sequence
from typing import Any

import pytest

from astraflow.rollout.v1.trajectory_pb2 import Episode
from astraflow_dataflow.rules.evaluation import TASK_PREFIX
from astraflow_dataflow.rules.groups import placed_headers
from astraflow_dataflow.store.episodes.pushes import Headers, commit_arguments, stored_headers
from astraflow_dataflow.store.writing import Argument
from support.dataflow_world import make_episode

NUM_ARGUMENTS = 7
"""Of a push, unless it is of an evaluation."""


def episode(task_id: str, member: int, **fields: Any) -> Episode:
    return make_episode(run_id="run", task_id=task_id, member=member, **fields)


def arguments(*episodes: Episode) -> tuple[list[Argument], list[int]]:
    return commit_arguments(episodes, headers(episodes))


def headers(episodes: Sequence[Episode]) -> list[Headers]:
    return [list(placed_headers(one)) for one in episodes]


def test_a_push_has_lines_of_its_episodes_and_of_their_trajectories() -> None:
    first = episode("t", 0, policies=("p", "q"), reward=0.5, version=3)
    tools = {"environment.tool_calls": 4.0, "environment.tool_errors": 1.0}
    second = episode("t", 1, policies=("p", "q"), version=3, metrics=tools)
    sent, sizes = arguments(first, second)
    assert sizes == [2]
    assert sent[:5] == ["t", 1, "n1", "2 2t4,1", "0\tt.0.1.n1\n1\tt.1.1.n1\t4,1"]
    assert str(sent[5]).split("\n") == [
        "t.0.1.n1.p\tp\t\t3\t3\t0.5",
        "t.0.1.n1.q\tq\t\t3\t3\t0.5",
        "t.1.1.n1.p\tp\t\t3\t3\t1.0",
        "t.1.1.n1.q\tq\t\t3\t3\t1.0",
    ]


@pytest.mark.parametrize(
    ("other", "how"),
    [
        ({"task_id": "u"}, "1 1"),
        ({"attempt": 2}, "1 1"),
        ({"node_id": "n2"}, "1 1"),
        ({"hedge": True}, "1 1h"),
        ({"failed": True}, "1 0f"),
        ({"policies": ("p", "q")}, "1 2"),
    ],
)
def test_whoever_differs_is_a_push_of_its_own(other: dict[str, Any], how: str) -> None:
    sent, sizes = arguments(episode("t", 0), episode(**{"task_id": "t", "member": 1, **other}))
    assert (sizes, sent[3], sent[NUM_ARGUMENTS + 3]) == ([1, 1], "1 1", how)


def test_episodes_that_others_come_between_are_two_pushes() -> None:
    _, sizes = arguments(
        *(episode(task, member) for task, member in (("t", 0), ("t", 1), ("u", 0), ("t", 2)))
    )
    assert sizes == [2, 1, 1]


@pytest.mark.parametrize(
    "twice",
    [
        {"member": 0, "episode_id": "other"},
        {"member": 1, "episode_id": "t.0.1.n1", "policies": ("q",)},
        {"task_id": "u", "member": 0, "episode_id": "t.0.1.n1"},
    ],
    ids=["a member", "an episode", "a trajectory"],
)
def test_what_comes_twice_is_said(twice: dict[str, Any]) -> None:
    sent, _ = arguments(episode("t", 0), episode(**{"task_id": "t", **twice}))
    assert str(sent[3]).endswith("d")


def test_an_evaluations_episodes_have_their_results_behind() -> None:
    sent, _ = arguments(episode(f"{TASK_PREFIX}solver:0:final:0", 0, metrics={"score": 0.5}))
    assert (sent[3], sent[NUM_ARGUMENTS]) == ("1 1e", "0.5 score")
    assert len(sent) == NUM_ARGUMENTS + 2


def test_headers_are_read_as_they_were_sent() -> None:
    some = [episode("t", 0, policies=("p", "q" * 200)), episode("t", 1, policies=("p", "q" * 200))]
    sent, _ = arguments(*some)
    framed = sent[6]
    assert isinstance(framed, bytes)
    assert list(stored_headers([framed, framed])) == [one for own in headers(some) for one in own] * 2
    assert list(stored_headers([b""])) == []
