"""Snapshots: which past version of a trained policy another policy plays, and which versions must be kept for that.

Pure. Uniform draws follow from the recipe and the newest version alone, so a restart continues where it was; those by
rating from the ratings at the time, and whoever announces one first decides. Numbers of a snapshot policy count its
draws: number n was drawn when the trained policy reached version n · `every_versions`. Called by `versions.snapshots`
and `ingest`.
"""

import hashlib
import math
from collections.abc import Mapping
from typing import TypeAlias

from astraflow.recipe.model import SnapshotSettings
from astraflow.rollout.v1 import trajectory_pb2
from astraflow_dataflow.rules.evaluation import is_evaluation_task

Ratings: TypeAlias = Mapping[int | None, tuple[float, int]]
"""Elo rating and rated episodes of versions; None stands for the trained policy as it is."""


def newest_draw(settings: SnapshotSettings, *, newest: int) -> int:
    """Return the number of the last draw that is due; `newest` is the newest version of the trained policy."""
    if settings.version is not None:
        return int(newest >= settings.version > 0)
    return newest // settings.every_versions


def pool(settings: SnapshotSettings, *, draw: int) -> tuple[int, ...]:
    """Return the versions that a draw chooses from, oldest first."""
    if settings.version is not None:
        return (settings.version if draw else 0,)
    oldest = max(0, draw - settings.keep + 1)
    return tuple(number * settings.every_versions for number in range(oldest, draw + 1))


def drawn(
    settings: SnapshotSettings, *, policy_id: str, draw: int, seed: int, ratings: Ratings | None = None
) -> int:
    """Return the version that a draw chose: each of its pool alike, or by rating.

    By rating, a version has the weight p · (1 − p), where p is what the trained policy is expected to score against it:
    most for an equal, little for one that it always beats. One that was never met counts as an equal.
    """
    versions = pool(settings, draw=draw)
    digest = hashlib.blake2b(f"{seed}/{policy_id}/{draw}".encode(), digest_size=8).digest()
    weights = [1.0] * len(versions)
    if settings.draw == "rating":
        own, _ = (ratings or {}).get(None, (0.0, 0))
        weights = [_closeness((ratings or {}).get(version, (own, 0))[0] - own) for version in versions]
    left = int.from_bytes(digest, "big") / 2**64 * math.fsum(weights)
    for version, weight in zip(versions, weights, strict=True):
        left -= weight
        if left < 0:
            return version
    return versions[-1]


def _closeness(ahead: float) -> float:
    expected = 1 / (1 + 10 ** (ahead / 400))
    return expected * (1 - expected)


def results(
    episode: trajectory_pb2.Episode, snapshots: Mapping[str, SnapshotSettings]
) -> list[tuple[str, int, float]]:
    """Return (snapshot policy, its draw, score of the trained policy) of an episode; none where it says no result."""
    if is_evaluation_task(episode.task_id):
        return []
    return [
        (policy_id, episode.draws[policy_id], episode.metrics[settings.result])
        for policy_id, settings in snapshots.items()
        if policy_id in episode.draws and 0 <= episode.metrics.get(settings.result, -1) <= 1
    ]


def kept(snapshots: Mapping[str, SnapshotSettings], *, of: str, newest: int) -> frozenset[int]:
    """Return the versions of the trained policy `of` that must stay in its store."""
    own = [settings for settings in snapshots.values() if settings.of == of]
    return frozenset(
        version for settings in own for version in pool(settings, draw=newest_draw(settings, newest=newest))
    )
