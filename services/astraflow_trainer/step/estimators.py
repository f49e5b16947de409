"""The advantage of each row of a batch: one estimator per role, over the rows of all ranks.

Invariant: every rank computes the same numbers from the same rows, and roles whose estimators are equal are computed
together. Running baselines depend on the batches alone, not on whether a guard skipped their steps: a replay of the
batches since a checkpoint finds them again. Called by the training step.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import TypeAlias

import numpy as np

from astraflow.recipe.advantage import AdvantageSettings, OverlongSettings
from astraflow_trainer.batches.rows import RowOrigin, TrainingRow
from astraflow_trainer.ranks.reductions import Ranks
from astraflow_trainer.step.advantages import Advantages, compute_advantages, flagged
from astraflow_trainer.step.groups import FloatArray, mean, samples_of
from astraflow_trainer.step.plugins import PluginAdvantage

Estimator: TypeAlias = AdvantageSettings | PluginAdvantage
MAX_BASELINES = 4096
_BY_TASK_AND_ROLE = AdvantageSettings()


@dataclass(frozen=True, kw_only=True)
class RankedRows:
    """What advantages depend on, of the rows of all ranks in rank order."""

    rewards: FloatArray
    """float64[N]."""
    lengths: Sequence[int]
    """Trained tokens of each row."""
    origins: Sequence[RowOrigin]
    mine: slice
    """This rank's rows."""

    @classmethod
    def gathered(cls, rows: Sequence[TrainingRow], *, ranks: Ranks) -> RankedRows:
        """Exchange what the ranks know of their rows; a collective."""
        own = [(row.reward, row.num_trained_tokens, *astuple(row.origin)) for row in rows]
        parts = [json.loads(part) for part in ranks.all_gather(json.dumps(own).encode())]
        start = sum(map(len, parts[: ranks.index]))
        facts = [fact for part in parts for fact in part]
        return cls(
            rewards=np.array([reward for reward, *_ in facts], dtype=np.float64),
            lengths=[length for _, length, *_ in facts],
            origins=[RowOrigin(*origin) for _, _, *origin in facts],
            mine=slice(start, start + len(rows)),
        )

    def at(self, positions: Sequence[int]) -> RankedRows:
        """Some of the rows."""
        return RankedRows(
            rewards=self.rewards[list(positions)],
            lengths=[self.lengths[position] for position in positions],
            origins=[self.origins[position] for position in positions],
            mine=slice(0, 0),
        )


def batch_advantages(
    rows: RankedRows,
    *,
    default: Estimator,
    of_role: Mapping[str, Estimator],
    baselines: Mapping[str, float],
) -> Advantages:
    """Return the advantages of a batch; roles that are not in `of_role` have the `default`.

    Raises PluginError.
    """
    values, zero_variance = np.zeros(len(rows.origins)), np.zeros(len(rows.origins), dtype=bool)
    changed: dict[str, float] = {}
    num_groups = num_flat = 0
    for estimator, positions in _parts(rows, default=default, of_role=of_role):
        part = _estimated(rows.at(positions), estimator=estimator, baselines=baselines)
        values[positions], zero_variance[positions] = part.values, part.zero_variance
        changed |= part.baselines
        num_groups += part.num_groups
        num_flat += part.num_zero_variance_groups
    return Advantages(
        values=values,
        zero_variance=zero_variance,
        num_groups=num_groups,
        num_zero_variance_groups=num_flat,
        baselines=changed,
    )


def note_baselines(baselines: dict[str, float], changed: Mapping[str, float]) -> None:
    """Bring running baselines up to date. Of more than MAX_BASELINES those stay that changed last: data sets name the
    sources of their tasks, and checkpoints keep a baseline of each.
    """
    for name, value in changed.items():
        baselines.pop(name, None)
        baselines[name] = value
    for name in list(baselines)[:-MAX_BASELINES]:
        del baselines[name]


def overlong_penalties(lengths: Sequence[int], *, settings: OverlongSettings | None) -> FloatArray:
    """float64[N]: what rows of so many trained tokens lose of their rewards, at least 0."""
    if settings is None:
        return np.zeros(len(lengths))
    free = settings.max_tokens - settings.buffer_tokens
    beyond = (np.asarray(lengths, dtype=np.float64) - free) / settings.buffer_tokens
    return settings.factor * beyond.clip(0, 1)


def role_metrics(rows: RankedRows, advantages: Advantages) -> dict[str, float]:
    """Return what curves show of each role, and the running baselines that the batch changed, after it."""
    named = {f"baseline/{name}": value for name, value in advantages.baselines.items()}
    roles = np.array([origin.role for origin in rows.origins])
    for role in dict.fromkeys(roles.tolist()):
        of_role = roles == role
        low, middle, high = np.quantile(rows.rewards[of_role], (0.1, 0.5, 0.9)).tolist()
        named |= {
            f"reward_mean/{role}": mean(rows.rewards[of_role]),
            f"reward_p10/{role}": low,
            f"reward_p50/{role}": middle,
            f"reward_p90/{role}": high,
            f"advantage_mean/{role}": mean(advantages.values[of_role]),
            f"advantage_std/{role}": float(advantages.values[of_role].std()),
            f"num_trajectories/{role}": float(of_role.sum()),
        }
    return named


def _parts(
    rows: RankedRows, *, default: Estimator, of_role: Mapping[str, Estimator]
) -> list[tuple[Estimator, list[int]]]:
    """The estimators in use, each with the positions of its rows."""
    positions_of: dict[str, list[int]] = {}
    for position, origin in enumerate(rows.origins):
        positions_of.setdefault(origin.role, []).append(position)
    parts: list[tuple[Estimator, list[int]]] = []
    for role, positions in positions_of.items():
        estimator = of_role.get(role, default)
        held = next((held for known, held in parts if known == estimator), None)
        if held is None:
            parts.append((estimator, positions))
        else:
            held.extend(positions)
    return parts


def _estimated(rows: RankedRows, *, estimator: Estimator, baselines: Mapping[str, float]) -> Advantages:
    if isinstance(estimator, AdvantageSettings):
        return compute_advantages(
            rows.rewards,
            origins=rows.origins,
            settings=estimator,
            lengths=rows.lengths,
            baselines=baselines,
        )
    samples = samples_of(rows.rewards, origins=rows.origins, settings=_BY_TASK_AND_ROLE)
    groups = np.zeros(len(rows.origins), dtype=np.int64)
    for number, members in enumerate(samples.groups):
        groups[members] = number
    values = estimator.of(rows.rewards, groups=groups.tolist(), lengths=rows.lengths)
    return flagged(values, samples=samples)
