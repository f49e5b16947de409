"""What a batch needs: which groups are taken, when it waits, and when it gives way."""

import pytest

from astraflow.plugins import ReadyGroup, TrajectorySummary
from astraflow.recipe.groups import BatchNeedsSettings
from astraflow_dataflow.batches.needs import pick, suited
from astraflow_dataflow.records import Candidates, Selection

EQUAL, UNEQUAL = (1.0, 1.0), (0.0, 1.0)


def ready(
    group_id: str, *, source: str = "a", task: str = "", rewards: tuple[float, ...] = EQUAL
) -> ReadyGroup:
    trajectories = tuple(TrajectorySummary(reward=reward) for reward in rewards)
    return ReadyGroup(
        group_id=group_id, task_id=task or group_id, source=source, arrival=0, trajectories=trajectories
    )


def needs(**least: int) -> BatchNeedsSettings:
    return BatchNeedsSettings.model_validate({"max_wait_s": 10} | least)


def offered(*, more_come: bool = True, lacked_s: float = 0.0) -> Candidates:
    return Candidates(outstanding=1, more_come=more_come, lacked_s=lacked_s, groups=())


@pytest.mark.parametrize(
    ("least", "taken"),
    [
        ({}, ["g0", "g1"]),
        # The oldest, and the oldest of another source.
        ({"min_sources": 2}, ["g0", "g2"]),
        # The only two whose rewards differ.
        ({"min_signal": 2}, ["g1", "g3"]),
        # g3 alone helps two needs, and so comes first; then the oldest.
        ({"min_sources": 2, "min_signal": 1}, ["g0", "g3"]),
        # g1 is of the same task as g0.
        ({"min_tasks": 2}, ["g0", "g2"]),
    ],
)
def test_the_groups_that_meet_the_needs_are_taken_the_oldest_first(
    least: dict[str, int], taken: list[str]
) -> None:
    groups = [
        ready("g0", task="t"),
        ready("g1", task="t", rewards=UNEQUAL),
        ready("g2", source="b"),
        ready("g3", source="b", rewards=UNEQUAL),
    ]
    if least == {"min_sources": 2, "min_signal": 1}:
        groups[1] = ready("g1")
    assert [group.group_id for group in pick(groups, needs(**least), 2)] == taken


def test_a_batch_waits_while_others_may_come_and_not_for_ever() -> None:
    groups, least = [ready("g0"), ready("g1"), ready("g2")], needs(min_sources=2, min_signal=1)
    waits = Selection(
        mode="lack", detail="the ready groups have 1 of 2 sources, 0 of 1 groups of unequal rewards"
    )
    assert suited(offered(lacked_s=9.9), groups, least, num_groups=2, chosen=None) == waits
    assert suited(offered(lacked_s=10), groups, least, num_groups=2, chosen=None) is None
    assert suited(offered(more_come=False), groups, least, num_groups=2, chosen=None) is None


def test_what_a_selector_chose_is_held_against_the_needs_and_not_changed() -> None:
    groups, least = [ready("g0"), ready("g1"), ready("g2", source="b")], needs(min_sources=2)
    poor, good = (Selection(mode="take", chosen=chosen) for chosen in [("g1", "g0"), ("g2", "g0")])
    asked = Selection(mode="wait")
    assert suited(offered(), groups, least, num_groups=2, chosen=good) == good
    assert suited(offered(), groups, least, num_groups=2, chosen=poor) == Selection(
        mode="lack", detail="the ready groups have 1 of 2 sources"
    )
    assert suited(offered(more_come=False), groups, least, num_groups=2, chosen=poor) == poor
    assert suited(offered(more_come=False), groups, least, num_groups=2, chosen=asked) == asked
