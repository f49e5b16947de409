"""Leases as one node is given them, and whether what it pushes was leased to it.

Pure. Redis knows a lease as `TASK#ATTEMPT`, of a second copy `TASK#ATTEMPT-h`; what leaves the server is sealed for the
lineage of the node that it was given to. Used by leasing and its sessions, and by whoever takes in pushes.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from astraflow.rollout.v1.trajectory_pb2 import Episode
from astraflow_kit.identity.sealing import Session, opened_lease, seal_lease

NOT_LEASE_HOLDER, UNKNOWN_ATTEMPT, WRONG_SESSION = "not_lease_holder", "unknown_attempt", "wrong_session"


@dataclass(frozen=True)
class LeaseSeals:
    """Seals and opens the leases of one node."""

    node: Session
    key: str = field(repr=False)

    def sealed(self, lease: str) -> str:
        """The id of a lease as the node is given it."""
        return seal_lease(lease, lineage=self.node.lineage, key=self.key)

    def opened(self, lease_id: str) -> str | None:
        """The lease of an id; None where it was not given to this node."""
        return opened_lease(lease_id, lineage=self.node.lineage, key=self.key)

    def own(self, lease_ids: Iterable[str]) -> Mapping[str, str]:
        """By their ids the leases, of those that were given to this node."""
        return {lease_id: lease for lease_id in lease_ids if (lease := self.opened(lease_id)) is not None}


def refusals(episodes: Sequence[Episode], seals: LeaseSeals) -> list[str]:
    """Why each episode is not the node's to push, or ''. Episodes that name no run or node get the session's."""
    opened: dict[str, str | None] = {}
    return [_refusal(episode, seals, opened) for episode in episodes]


def _refusal(episode: Episode, seals: LeaseSeals, opened: dict[str, str | None]) -> str:
    node, lease_id = seals.node, episode.lease_id
    if not episode.node_id:
        episode.node_id = node.name
    if not episode.run_id:
        episode.run_id = node.run_id
    if episode.node_id != node.name or episode.run_id != node.run_id:
        return WRONG_SESSION
    if lease_id not in opened:
        opened[lease_id] = seals.opened(lease_id)
    lease = opened[lease_id]
    if lease == f"{episode.task_id}#{episode.attempt}{'-h' if episode.hedge else ''}":
        return ""
    is_of_task = lease is not None and lease.rpartition("#")[0] == episode.task_id
    return UNKNOWN_ATTEMPT if is_of_task else NOT_LEASE_HOLDER
