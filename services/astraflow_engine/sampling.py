"""Choosing the next token of every row, and the log-prob it is recorded with.

Invariant: a draw depends on the row's own seed and its number of earlier draws, never on which other rows
share the pass, so a request repeats under any batching. The log-prob is that of the temperature-scaled
distribution over the whole vocabulary, log_softmax(logits / T); top-k and top-p restrict the draw but not
the log-prob, and a greedy row (T = 0) is recorded at T = 1. These are SGLang's definitions, so a trainer
needs no second rule. Called by the scheduler thread after every pass.

Shape legend: B rows, V vocabulary.
"""

from dataclasses import dataclass

import numpy as np
import torch

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_KEEP_ALL = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSampling:
    """How one row draws: `temperature` 0 is greedy, `top_k` -1 keeps all, `seed` is unsigned 64 bit."""

    temperature: float
    top_p: float
    top_k: int
    seed: int


class SamplingSlots:
    """The sampling state of every slot, kept as arrays so that a step loops over no row in Python."""

    def __init__(self, num_slots: int) -> None:
        self._seeds = np.zeros(num_slots, dtype=np.uint64)
        self._draws = np.zeros(num_slots, dtype=np.uint64)
        self._temperatures = np.ones(num_slots, dtype=np.float32)
        self._greedy = np.zeros(num_slots, dtype=np.bool_)
        self._top_k = np.full(num_slots, _KEEP_ALL, dtype=np.int64)
        self._top_p = np.ones(num_slots, dtype=np.float32)

    def assign(self, slot: int, row: RowSampling, *, num_drawn: int) -> None:
        """Give a slot to a request that has drawn `num_drawn` tokens before (0 unless it was retracted)."""
        self._seeds[slot] = row.seed
        self._draws[slot] = num_drawn
        self._temperatures[slot] = row.temperature or 1.0
        self._greedy[slot] = row.temperature == 0.0 or row.top_k == 1
        self._top_k[slot] = row.top_k if row.top_k > 0 else _KEEP_ALL
        self._top_p[slot] = row.top_p

    def exchange(self, first: int, second: int) -> None:
        """Swap the state of two slots."""
        for state in (self._seeds, self._draws, self._temperatures, self._greedy, self._top_k, self._top_p):
            state[[first, second]] = state[[second, first]]

    def step(self, logits_BV: torch.Tensor, *, slots_B: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """Draw one token for each slot named and count it; returns int64 [B] and log-probs fp32 [B]."""
        temperatures = self._temperatures[slots_B]
        if (temperatures != 1.0).any():
            logits_BV = logits_BV / torch.from_numpy(temperatures).unsqueeze(-1)
        logprobs_BV = torch.log_softmax(logits_BV, dim=-1)
        tokens_B = self._choose(logprobs_BV, slots_B=slots_B)
        self._draws[slots_B] += np.uint64(1)
        return tokens_B, logprobs_BV.gather(-1, tokens_B.unsqueeze(-1)).squeeze(-1)

    def _choose(self, logprobs_BV: torch.Tensor, *, slots_B: np.ndarray) -> torch.Tensor:
        greedy = self._greedy[slots_B]
        if greedy.all():
            return logprobs_BV.argmax(dim=-1)
        probs_BV = logprobs_BV.exp()
        top_k, top_p = self._top_k[slots_B], self._top_p[slots_B]
        if (top_k < probs_BV.shape[-1]).any() or (top_p < 1.0).any():
            probs_BV = _restrict(probs_BV, top_k_B=torch.from_numpy(top_k), top_p_B=torch.from_numpy(top_p))
        points = uniforms(self._seeds[slots_B], self._draws[slots_B])
        drawn = _invert_cdf(probs_BV, points_B=torch.from_numpy(points))
        if not greedy.any():
            return drawn
        return torch.where(torch.from_numpy(greedy), logprobs_BV.argmax(dim=-1), drawn)


def _invert_cdf(probs_BV: torch.Tensor, *, points_B: torch.Tensor) -> torch.Tensor:
    """The token under each point of (0, 1); weights need not sum to 1, and weight 0 is never chosen."""
    # fp64: fp32 sums would lose the tail of a large vocabulary.
    cumulative = probs_BV.cumsum(dim=-1, dtype=torch.float64)
    scaled = points_B.unsqueeze(-1) * cumulative[:, -1:]
    return torch.searchsorted(cumulative, scaled, right=True).squeeze(-1).clamp_(max=probs_BV.shape[-1] - 1)


def _restrict(probs_BV: torch.Tensor, *, top_k_B: torch.Tensor, top_p_B: torch.Tensor) -> torch.Tensor:
    """Weights with everything outside the kept set at 0: ranks below k, and the smallest head whose mass
    reaches p. Both are judged on the unrestricted probabilities, as SGLang does."""
    ordered, order = probs_BV.sort(dim=-1, descending=True)
    before = ordered.cumsum(dim=-1) - ordered
    ranks = torch.arange(ordered.shape[-1])
    dropped = (ranks >= top_k_B.unsqueeze(-1)) | (before > top_p_B.unsqueeze(-1))
    return torch.zeros_like(probs_BV).scatter_(-1, order, ordered.masked_fill_(dropped, 0.0))


def uniforms(seeds: np.ndarray, draws: np.ndarray) -> np.ndarray:
    """Uniform numbers in (0, 1), one per (seed, draw) pair: both uint64 [B], result float64 [B]."""
    with np.errstate(over="ignore"):
        mixed = _mix(_mix(seeds) + (draws + np.uint64(1)) * _GOLDEN)
    # 52 bits plus a half: never 0 and never 1, so a zero-probability token cannot be hit at either end.
    uniform: np.ndarray = ((mixed >> np.uint64(12)).astype(np.float64) + 0.5) / 2.0**52
    return uniform


def derive_seed(*parts: int) -> int:
    """One well mixed unsigned 64-bit seed from several integers; order matters."""
    state = np.zeros(1, dtype=np.uint64)
    with np.errstate(over="ignore"):
        for part in parts:
            state = _mix(state + np.uint64(part & 0xFFFFFFFFFFFFFFFF) + _GOLDEN)
    return int(state[0])


def _mix(values: np.ndarray) -> np.ndarray:
    """The finalizer of splitmix64."""
    values = (values ^ (values >> np.uint64(30))) * _MIX_1
    values = (values ^ (values >> np.uint64(27))) * _MIX_2
    mixed: np.ndarray = values ^ (values >> np.uint64(31))
    return mixed
