"""Which rows are compared with one another, and by what numbers.

Pure functions of rewards, origins and settings. Invariant: groups are a property of the set of rows, so the order of
rows changes neither them nor what is computed from them. Called by `advantages`.
"""

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from astraflow.recipe.advantage import AdvantageSettings, GroupBy, Shaping
from astraflow_trainer.batches.rows import RowOrigin

FloatArray: TypeAlias = NDArray[np.float64]
Members: TypeAlias = list[NDArray[np.intp]]
"""The positions in each group."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Samples:
    """What is compared: one number per row, or with `per_episode` one for the rows of an episode in a group."""

    values: FloatArray
    """float64[M]."""
    groups: Members
    """Positions in `values`."""
    of_row: NDArray[np.intp]
    """int[N]: the sample of each row."""
    first_row: NDArray[np.intp]
    """int[M]: a row of each sample."""


def samples_of(rewards: FloatArray, *, origins: Sequence[RowOrigin], settings: AdvantageSettings) -> Samples:
    """Return what is compared, shaped as the settings say."""
    keys = group_keys(origins, settings=settings)
    shaped = _shaped(rewards, keys=keys, origins=origins, settings=settings)
    sample_keys: list[Hashable] = list(range(len(rewards)))
    if settings.per_episode:
        sample_keys = [(key, at.task_id, at.member) for key, at in zip(keys, origins, strict=True)]
    samples = members_of(sample_keys)
    first_row = np.array([rows[0] for rows in samples], dtype=np.intp)
    of_row = np.zeros(len(rewards), dtype=np.intp)
    for index, rows in enumerate(samples):
        of_row[rows] = index
    return Samples(
        values=np.array([mean(shaped[rows]) for rows in samples], dtype=np.float64),
        groups=members_of(keys[row] for row in first_row),
        of_row=of_row,
        first_row=first_row,
    )


def group_keys(origins: Sequence[RowOrigin], *, settings: AdvantageSettings) -> list[Hashable]:
    """Return what names the group of each row."""
    keys: list[Hashable] = [_key(at, settings.group_by) for at in origins]
    if settings.min_rows == 1:
        return keys
    sizes = Counter(keys)
    by_task = [GroupBy.TASK, *(part for part in settings.group_by if part is not GroupBy.EPISODE)]
    return [
        key if sizes[key] >= settings.min_rows else ("per task", _key(at, by_task))
        for key, at in zip(keys, origins, strict=True)
    ]


def baseline_names(origins: Sequence[RowOrigin], *, settings: AdvantageSettings) -> list[str]:
    """Return the name in checkpoints of each row's running baseline, `role=solver/source=sums`."""
    order = [part for part in (GroupBy.ROLE, GroupBy.TURN, GroupBy.SOURCE) if part in settings.group_by]
    return ["/".join(f"{part}={_part(at, part)}" for part in order) for at in origins]


def members_of(keys: Iterable[Hashable]) -> Members:
    """Return the positions of equal keys."""
    positions: dict[Hashable, list[int]] = {}
    for position, key in enumerate(keys):
        positions.setdefault(key, []).append(position)
    return [np.asarray(members, dtype=np.intp) for members in positions.values()]


def mean(values: FloatArray) -> float:
    """Return the mean, the same for every order of `values`; not empty."""
    return math.fsum(values) / len(values)


def _key(at: RowOrigin, parts: Sequence[GroupBy]) -> Hashable:
    return tuple(_part(at, part) for part in parts)


def _part(at: RowOrigin, part: GroupBy) -> Hashable:
    match part:
        case GroupBy.TASK:
            return at.task_id
        case GroupBy.ROLE:
            return at.role
        case GroupBy.EPISODE:
            return at.task_id, at.member
        case GroupBy.TURN:
            return at.turn
        case GroupBy.SOURCE:
            return at.source


def _shaped(
    rewards: FloatArray,
    *,
    keys: Sequence[Hashable],
    origins: Sequence[RowOrigin],
    settings: AdvantageSettings,
) -> FloatArray:
    """Rewards of later turns, changed by those of the earlier ones in the same group and episode."""
    if settings.shaping is Shaping.NONE:
        return rewards
    result = rewards.copy()
    turns = np.array([at.turn for at in origins])
    for rows in members_of((key, at.task_id, at.member) for key, at in zip(keys, origins, strict=True)):
        for row in rows:
            earlier = rewards[rows[turns[rows] < turns[row]]]
            if len(earlier):
                added = _added(float(rewards[row]), quality=mean(earlier), shaping=settings.shaping)
                result[row] += settings.shaping_weight * added
    return result


def _added(reward: float, *, quality: float, shaping: Shaping) -> float:
    if shaping is Shaping.MARGIN:
        return reward - quality
    return quality * reward - (1 - quality) * (1 - reward)
