"""How long calls take in a study whose time is imposed: a fixed trace, and the bound that no schedule can beat.

Invariant: a duration is a pure function of seed, task, episode and call, so every discipline plays the same trace on
any machine. `timed_team` sleeps these times; `disciplines` computes the bound from them.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from statistics import NormalDist, median
from typing import Protocol

_Z99 = NormalDist().inv_cdf(0.99)
LONGEST = 16_000 / 1_500
"""Cap in medians: answers of a median of 1,500 tokens, cut at 16,000."""


class Trace(Protocol):
    """Durations in units of the median."""

    def of(self, key: str) -> float:
        """Of the call that `key` names; equal keys give equal durations."""


class Lognormal:
    """exp(σ·z) with σ = ln(tail) / z99, so that the 99th percentile is `tail` medians; at most `LONGEST`.

    Raises ValueError for a tail below 1.
    """

    def __init__(self, *, tail: float, seed: int) -> None:
        if not tail >= 1:
            raise ValueError(f"tail is {tail}, the 99th percentile over the median; give 1 or more")
        self._sigma, self._seed = math.log(tail) / _Z99, seed

    @staticmethod
    def mean(tail: float) -> float:
        """Mean of the draws without the cap, in medians: e^(σ²/2)."""
        return math.exp((math.log(tail) / _Z99) ** 2 / 2)

    def of(self, key: str) -> float:
        drawn = random.Random(f"lognormal/{self._seed}/{key}").gauss(0.0, self._sigma)
        return min(math.exp(drawn), LONGEST)


class Recorded:
    """Lengths of a recording, drawn alike, in units of their median. Raises ValueError unless all are positive."""

    def __init__(self, lengths: Sequence[float], *, seed: int) -> None:
        if not lengths or not all(math.isfinite(length) and length > 0 for length in lengths):
            raise ValueError("recorded lengths must be positive numbers, at least one")
        middle = median(lengths)
        self._lengths, self._seed = [length / middle for length in lengths], seed

    def of(self, key: str) -> float:
        return random.Random(f"recorded/{self._seed}/{key}").choice(self._lengths)


def ideal_step_s(*, call_s: float, slots: int, train_s: float) -> float:
    """Least seconds of a step, on average over many, of any schedule whatever: max(call_s / slots, train_s).

    `call_s` are the seconds of all calls that a step needs. `slots` calls run at a time, so they take call_s / slots
    even if no slot is ever free; a trainer takes one step after the other, so they take train_s even if its batches
    are always there. docs/studies.md derives it.
    """
    return max(call_s / slots, train_s)
