"""Snapshots: which past version of a trained policy another policy plays, and which versions must be kept for that.

Pure, and a function of the recipe and of the newest version alone: servers agree without speaking, and a restart
continues where it was. Numbers of a snapshot policy count its draws: number n was drawn when the trained policy reached
version n · `every_versions`. Called by `versions.snapshots`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from astraflow.recipe.settings import SnapshotSettings


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


def drawn(settings: SnapshotSettings, *, policy_id: str, draw: int, seed: int) -> int:
    """Return the version that a draw chose: each of its pool alike."""
    versions = pool(settings, draw=draw)
    text = f"{seed}/{policy_id}/{draw}".encode()
    return versions[int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") % len(versions)]


def kept(snapshots: Mapping[str, SnapshotSettings], *, of: str, newest: int) -> frozenset[int]:
    """Return the versions of the trained policy `of` that must stay in its store."""
    own = [settings for settings in snapshots.values() if settings.of == of]
    return frozenset(
        version for settings in own for version in pool(settings, draw=newest_draw(settings, newest=newest))
    )
