"""Every wait there is, in the order in which a person must see to them.

Pure. What lies under the others comes first: while the store is missing nothing that needs it can end. Within one rank
the longest wait is first. docs/debugging.md explains each; tests compare both with the rules that name them. Used by
`why`, `status`, and both views of the launcher.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import IntEnum

from astraflow.dataflow.v1 import admin_service_pb2 as pb

__all__ = ["RANKS", "Rank", "in_order", "is_alarm", "rank_of"]


class Rank(IntEnum):
    """What kind of a wait it is; a lower number is seen to first."""

    DOUBT = 3
    """The parts disagree about the past: a person decides."""
    STORE = 4
    """The weight store cannot be used."""
    SILENT = 5
    """Something runs and does nothing."""
    BROKEN = 6
    """A plug-in, an environment or stored bytes are wrong."""
    MISSING = 7
    """Something must be started, submitted or resumed."""
    STARTING = 8
    """It takes time and ends by itself."""
    FLOW = 9
    """The stages wait for each other, as they do in every run."""


_BY_RANK: Mapping[Rank, tuple[str, ...]] = {
    Rank.DOUBT: ("state_in_doubt",),
    Rank.STORE: ("store_missing", "store_read_only", "store_full", "store_unreachable"),
    Rank.SILENT: ("engine_hung", "trainer_silent"),
    Rank.BROKEN: (
        *("dataset_failed", "curator_failed", "filter_failed", "selector_failed"),
        *("environment_unavailable", "weight_fault"),
    ),
    Rank.MISSING: (
        *("no_node", "no_capable_node", "no_trainer", "policy_not_served", "no_version"),
        *("dataset_exhausted", "tasks_skipped", "paused"),
    ),
    Rank.STARTING: ("warm_start", "model_loading", "node_starting"),
    Rank.FLOW: (
        *("staleness_window", "no_credit", "node_behind", "selector", "turn", "ready_groups"),
        *("publish", "unpublished", "no_node_at_version"),
    ),
}
RANKS: Mapping[str, Rank] = {reason: rank for rank, reasons in _BY_RANK.items() for reason in reasons}
"""The rank of each reason."""


def rank_of(wait: pb.Wait) -> Rank:
    """Return the rank of a wait; one that only a later release knows is like those of every run."""
    return RANKS.get(wait.reason, Rank.FLOW)


def is_alarm(wait: pb.Wait) -> bool:
    """Whether a person should hear of it at once: something is wrong that does not pass like the waits of a run."""
    return rank_of(wait) <= Rank.SILENT


def in_order(waits: Iterable[pb.Wait]) -> list[pb.Wait]:
    """Return the waits as a person must see to them."""
    return sorted(waits, key=lambda wait: (rank_of(wait), -wait.waited_duration.ToNanoseconds()))
