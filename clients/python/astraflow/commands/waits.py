"""Every wait there is, in the order in which a person must see to them.

Pure. What lies under the others comes first: while no server answers nothing else can be known, while its Redis is full
little else can end. Within one rank the longest wait is first. docs/debugging.md explains each; tests compare both with
the rules that name them. Used by `why`, `status`, and both views of the launcher.
"""

import time
from collections.abc import Iterable, Mapping
from enum import IntEnum

from astraflow.dataflow.v1 import admin_service_pb2 as pb
from astraflow.errors import AstraflowError, DeadlineError


class Rank(IntEnum):
    """What kind of a wait it is; a lower number is seen to first."""

    SERVER = 1
    """No server answers."""
    DATA = 2
    """The server's Redis cannot be used as it must be."""
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
    Rank.SERVER: ("server_unreachable", "server_silent"),
    Rank.DATA: (
        *("redis_silent", "redis_read_only", "redis_disk_full", "redis_full"),
        *("payloads_away", "payloads_lost", "redis_slow"),
    ),
    Rank.DOUBT: ("state_in_doubt",),
    Rank.STORE: ("store_missing", "store_read_only", "store_full", "store_unreachable"),
    Rank.SILENT: ("engine_hung", "plugin_hung", "trainer_hung", "trainer_silent", "descriptors_exhausted"),
    Rank.BROKEN: (
        *("callers_refused", "token_ended"),
        *("dataset_failed", "curator_failed", "filter_failed", "selector_failed"),
        *(
            "environment_unavailable",
            "node_poison",
            "node_refused",
            "weight_fault",
            "archive_failed",
            "archive_behind",
        ),
    ),
    Rank.MISSING: (
        *("no_node", "no_capable_node", "no_trainer", "policy_not_served", "no_version"),
        *("dataset_exhausted", "tasks_skipped", "paused", "token_ends"),
    ),
    Rank.STARTING: ("warm_start", "model_loading", "node_starting"),
    Rank.FLOW: (
        *("staleness_window", "lease_quota", "barrier", "no_credit", "node_behind", "selector", "turn"),
        *("ready_groups", "batch_needs", "publish", "unpublished", "no_node_at_version"),
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


def server_wait(address: str, error: AstraflowError, *, silent_s: float) -> pb.Wait:
    """Return the wait for a dataflow server that did not answer a call: a silent one when nothing refused it."""
    silent = isinstance(error, DeadlineError)
    what = "takes calls and answers none" if silent else f"cannot be reached ({error.message})"
    wait = pb.Wait(
        stage="server",
        reason="server_silent" if silent else "server_unreachable",
        detail=f"the dataflow server at {address} {what}; meanwhile nodes keep what they finish, trainers wait, and "
        "nothing is lost",
        released_by="end its process and start it again: it hangs, or its machine does"
        if silent
        else "start it again, or bring the network to it back; everybody goes on by himself",
    )
    wait.waited_duration.FromMilliseconds(int(silent_s * 1000))
    wait.since_time.FromMilliseconds(int((time.time() - silent_s) * 1000))
    return wait
