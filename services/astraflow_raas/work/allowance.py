"""How many episodes a node runs at once: as many as keep its engines busy, at most what the recipe allows.

Invariant: pure; time comes with the samples. An engine that is full gets no more than a small queue, because episodes
that wait only grow stale; one that is not gets more until the recipe's bound. Driven by `node.load_watch`.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from astraflow_raas.engine.base import EngineLoad

_QUEUE = 1.25
"""Sequences wanted per sequence that the engine can sample: those that wait take the places of those that end."""
_FULL_KV = 0.9
"""Share of the memory for keys and values beyond which engines begin to send sequences back."""
_FEWEST_CALLS = 0.01
_WINDOW_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowance:
    """Episodes at once, and which bound that is: `recipe`, `engine_slots`, `engine_kv` or `tokens_per_s`."""

    episodes: int
    bounded_by: str


class EngineUse:
    """What episodes ask of one policy's engines and what these do, as means of the last busy seconds."""

    def __init__(self, *, slots: int) -> None:
        self.slots = slots
        """Sequences that the engines sample at once."""
        self.running = self.waiting = self.tokens_per_s = 0.0
        self.kv_usage: float | None = None
        self.tokens_per_call = 0.0
        """Of calls that were answered; 0 before the first."""
        self.fault = ""
        """Why the node counts itself; empty while the engine's own report is used."""
        self._is_busy = False
        # Until it is measured, an episode counts as one call.
        self._demand = self._episodes = float(slots)

    @property
    def calls_per_episode(self) -> float:
        """Calls that an episode has at any moment: below 1 where it also waits for environments or rewards."""
        return max(_FEWEST_CALLS, self._demand / self._episodes)

    def note(
        self, load: EngineLoad, *, calls: int, episodes: int, elapsed_s: float, tokens_per_call: float
    ) -> None:
        """Take a sample `elapsed_s` after the last one: the engines' load, and the calls and episodes of this node."""
        share = min(1.0, elapsed_s / _WINDOW_S)
        demand = max(calls, load.running + load.waiting)
        if episodes:
            self._demand += share * (demand - self._demand)
            self._episodes += share * (episodes - self._episodes)
        # Figures that are compared with each other are means over the same time.
        share = share if demand and self._is_busy else 1.0
        self._is_busy = demand > 0
        self.running += share * (load.running - self.running)
        self.waiting += share * (demand - load.running - self.waiting)
        self.tokens_per_s += share * (load.tokens_per_s - self.tokens_per_s)
        if load.kv_usage is None or self.kv_usage is None:
            self.kv_usage = load.kv_usage
        else:
            self.kv_usage += share * (load.kv_usage - self.kv_usage)
        self.tokens_per_call = tokens_per_call


def allow(uses: Iterable[EngineUse], *, most_episodes: int, group_size: int, call_s: float) -> Allowance:
    """The episodes that a node with these engines runs at once: whole groups, at least one.

    `most_episodes` is the recipe's bound; `call_s` is how long an answer may take at most.
    """
    bounds = [(float(most_episodes), "recipe")]
    for use in uses:
        bounds += [
            (_QUEUE * capacity / use.calls_per_episode, slug) for capacity, slug in _capacities(use, call_s)
        ]
    bound, slug = min(bounds)
    whole_groups = group_size * max(1, math.ceil(bound / group_size))
    return Allowance(episodes=min(max(group_size, most_episodes), whole_groups), bounded_by=slug)


def _capacities(use: EngineUse, call_s: float) -> Iterator[tuple[float, str]]:
    """Sequences that the engines can sample at once, by what limits them."""
    yield use.slots, "engine_slots"
    if use.fault or use.running < 1:
        return  # their own count says nothing of memory and speed
    if use.kv_usage:
        yield use.running * _FULL_KV / use.kv_usage, "engine_kv"
    if use.tokens_per_s and use.tokens_per_call:
        yield use.tokens_per_s * call_s / use.tokens_per_call, "tokens_per_s"
