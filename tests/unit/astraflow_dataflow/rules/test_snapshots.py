"""Which past version a snapshot policy plays, and what must be kept for it: a function of the newest version alone."""

from collections import Counter

import pytest

from astraflow.recipe.model import SnapshotSettings
from astraflow.rollout.v1 import trajectory_pb2
from astraflow_dataflow.rules.snapshots import drawn, kept, newest_draw, pool, results

FIXED = SnapshotSettings(of="player", version=5)
EVERY = SnapshotSettings(of="player", every_versions=10)
POOL = SnapshotSettings(of="player", every_versions=10, keep=3)


@pytest.mark.parametrize(
    ("settings", "newest", "draw", "versions"),
    [
        (FIXED, 4, 0, (0,)),
        (FIXED, 5, 1, (5,)),
        (FIXED, 99, 1, (5,)),
        (SnapshotSettings(of="player", version=0), 3, 0, (0,)),
        (EVERY, 9, 0, (0,)),
        (EVERY, 31, 3, (30,)),
        (POOL, 15, 1, (0, 10)),
        (POOL, 50, 5, (30, 40, 50)),
    ],
)
def test_a_pool_has_the_newest_multiples_and_a_fixed_version_stays(
    settings: SnapshotSettings, newest: int, draw: int, versions: tuple[int, ...]
) -> None:
    assert newest_draw(settings, newest=newest) == draw
    assert pool(settings, draw=draw) == versions
    assert drawn(settings, policy_id="rival", draw=draw, seed=1) in versions


def test_members_are_drawn_alike_and_the_same_by_every_server() -> None:
    def draws(seed: int) -> list[int]:
        return [drawn(POOL, policy_id="rival", draw=draw, seed=seed) // 10 - draw for draw in range(2, 902)]

    assert draws(1) == draws(1)
    assert draws(1) != draws(2)
    assert Counter(draws(1)).keys() == {0, -1, -2}
    assert min(Counter(draws(1)).values()) > 240


def test_what_any_snapshot_of_a_policy_may_play_is_kept() -> None:
    snapshots = {"rival": POOL, "first": FIXED, "other": SnapshotSettings(of="critic", every_versions=1)}
    assert kept(snapshots, of="player", newest=4) == {0}
    assert kept(snapshots, of="player", newest=42) == {5, 20, 30, 40}


def test_by_rating_an_equal_is_drawn_more_often_than_one_that_always_loses() -> None:
    by_rating = POOL.model_copy(update={"draw": "rating"})
    # Against 800 points less one is expected to score 0.990; 0.0098 of 0.25, 0.25 and 0.0098 in all are 4 %.
    counts = Counter[int]()
    for draw in range(2, 2002):
        first, second, third = pool(POOL, draw=draw)
        ratings = {None: (1500.0, 9), first: (700.0, 9), second: (1500.0, 9)}
        counts[drawn(by_rating, policy_id="rival", draw=draw, seed=3, ratings=ratings) - third] += 1
    assert counts[0] + counts[-10] > 1900, "an equal, and one that was never met"
    assert 900 < counts[0] < 1060
    assert 15 < counts[-20] < 80


@pytest.mark.parametrize(
    ("task_id", "draws", "metrics", "expected"),
    [
        ("t", {"rival": 3}, {"win": 0.5}, [("rival", 3, 0.5)]),
        ("t", {"rival": 3}, {"win": 1.5}, []),
        ("t", {"rival": 3}, {"team": 1.0}, []),
        ("t", {}, {"win": 1.0}, []),
        ("eval:e:0", {"rival": 3}, {"win": 1.0}, []),
    ],
)
def test_a_training_episode_with_one_draw_and_a_score_has_a_result(
    task_id: str, draws: dict[str, int], metrics: dict[str, float], expected: list[tuple[str, int, float]]
) -> None:
    episode = trajectory_pb2.Episode(task_id=task_id, draws=draws, metrics=metrics)
    assert results(episode, {"rival": POOL}) == expected
