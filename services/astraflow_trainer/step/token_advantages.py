"""Advantages of single tokens: discounted returns, what a critic expected (GAE), penalties for leaving a reference, and
whitening over the batch.

Invariant: what a row's tokens get depends on the batch alone, not on the order of its rows or their spread over ranks;
sums are exact before they are rounded. Called by the training step, after the advantages of rows.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from astraflow.recipe.advantage import AdvantageSettings, Gae
from astraflow.recipe.algorithm import KlSettings
from astraflow_trainer.batches.packing import MicroBatch
from astraflow_trainer.model.model import PolicyModel
from astraflow_trainer.ranks.reductions import Ranks
from astraflow_trainer.step.estimators import Estimator
from astraflow_trainer.step.groups import FloatArray
from astraflow_trainer.step.losses.kl import kl_estimate


@dataclass(frozen=True, slots=True, kw_only=True)
class Penalised:
    """A row and what its tokens lose for leaving the reference."""

    estimator: Estimator
    """Of the row's role."""
    lost: FloatArray
    """float64[T] of its trained tokens."""
    expected: FloatArray | None = None
    """float64[T]: what a critic expected before each of them; None without a critic."""

    @property
    def values(self) -> FloatArray:
        """float64[T]: what was expected, 0 without a critic."""
        return np.zeros_like(self.lost) if self.expected is None else self.expected

    @property
    def by_token(self) -> bool:
        """Whether single tokens have returns of their own; else the row's reward loses the sum."""
        return isinstance(self.estimator, AdvantageSettings) and self.estimator.by_token


def kl_penalties(
    policy: PolicyModel,
    batches: Sequence[MicroBatch],
    *,
    num_tokens: Sequence[int],
    kl: KlSettings | None,
    reference: PolicyModel | None,
) -> list[FloatArray]:
    """float64[T] of each row: coefficient · estimate of KL(policy ‖ reference); zeros for a term of the loss.

    A collective of one forward pass of both models. `num_tokens` are the trained tokens of each row in `batches`.
    """
    found = [np.zeros(count) for count in num_tokens]
    if kl is None or kl.placement == "loss":
        return found
    for batch in batches:
        with torch.no_grad():
            logprob_N = policy.score(batch).logprob_N
            against_N = batch.behavior_logprob_N if reference is None else reference.score(batch).logprob_N
        estimate_N = kl_estimate(logprob_N, reference_N=against_N, estimator=kl.estimator)
        rows, counts = torch.unique_consecutive(batch.row_N, return_counts=True)
        for row, part in zip(rows.tolist(), estimate_N.split(counts.tolist()), strict=True):
            found[row] = kl.coefficient * part.double().numpy()
    return found


def token_advantages(
    values: Sequence[float],
    rows: Sequence[Penalised],
    *,
    kl: KlSettings | None,
    whitened: Sequence[AdvantageSettings],
    ranks: Ranks,
) -> list[FloatArray]:
    """float64[T] of each of this rank's rows, whose advantages are `values`; a collective.

    `whitened` are the estimators of all roles that whiten, the same on every rank.
    """
    in_reward = kl is not None and kl.placement == "reward"
    result = [_returns(value, row, in_reward=in_reward) for value, row in zip(values, rows, strict=True)]
    for estimator in whitened:
        held = [place for place, row in enumerate(rows) if row.estimator == estimator]
        parts = [np.zeros(0), *(result[place] for place in held)]
        for place, white in zip(held, _whitened(parts, ranks=ranks), strict=True):
            result[place] = white
    if kl is not None and kl.placement == "advantage":
        result = [values - row.lost for values, row in zip(result, rows, strict=True)]
    return result


def returns_for_critic(
    values: Sequence[float], rows: Sequence[Penalised], *, kl: KlSettings | None
) -> list[FloatArray]:
    """float64[T] of each row: what the critic is to expect, A_t + V_t before whitening. Rows have what it expected."""
    in_reward = kl is not None and kl.placement == "reward"
    pairs = zip(values, rows, strict=True)
    return [_returns(value, row, in_reward=in_reward) + row.values for value, row in pairs]


def _returns(value: float, row: Penalised, *, in_reward: bool) -> FloatArray:
    """Σ over later tokens of discount^distance · what each earns: the last one `value`, each less its penalty. With a
    critic, what that is beyond its expectations, by `Gae`'s formula, of which the former is the case V = 0, λ = 1.
    """
    if not (row.by_token and isinstance(row.estimator, AdvantageSettings)):
        return np.full(len(row.lost), value)
    earned = -row.lost if in_reward else np.zeros_like(row.lost)
    earned[-1] += value
    discount, lam = row.estimator.discount, row.estimator.lam if isinstance(row.estimator, Gae) else 1.0
    surprise = earned + discount * np.append(row.values[1:], 0.0) - row.values
    result, after = np.empty_like(earned), 0.0
    for place in range(len(earned) - 1, -1, -1):
        after = surprise[place] + discount * lam * after
        result[place] = after
    return result


def _whitened(parts: Sequence[FloatArray], *, ranks: Ranks) -> Iterator[FloatArray]:
    """All parts but the first, which is empty, with mean 0 and variance 1 over the tokens of all ranks."""
    everybody = ranks.gather(torch.from_numpy(np.concatenate(parts))).numpy()
    mean = math.fsum(everybody) / max(1, len(everybody))
    squares = math.fsum((everybody - mean) ** 2)
    deviation = math.sqrt(squares / max(1, len(everybody) - 1))
    for part in parts[1:]:
        # Equal numbers leave a residue of rounding, which must not be blown up.
        flat = deviation <= 1e-12 * max(1.0, abs(mean))
        yield np.zeros_like(part) if flat else (part - mean) / (deviation + 1e-8)
