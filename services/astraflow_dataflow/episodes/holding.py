"""Pushes are taken in from whoever was given the lease, and from nobody else.

Invariant: what a session was not given costs nobody but itself: nothing of it is stored, judged or counted as
another's; it is answered REFUSED with the reason, and counted. Made by `server`; called by the trajectory service.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from astraflow.dataflow.v1.trajectory_service_pb2 import OUTCOME_REFUSED, PushResult
from astraflow.rollout.v1.trajectory_pb2 import Episode
from astraflow_dataflow.episodes.ingest import Ingest
from astraflow_dataflow.runs.current_sessions import CurrentSessions
from astraflow_dataflow.runs.lease_seals import (
    NOT_LEASE_HOLDER,
    UNKNOWN_ATTEMPT,
    WRONG_SESSION,
    LeaseSeals,
    refusals,
)
from astraflow_dataflow.runs.registry import RunContext
from astraflow_dataflow.store.episodes.commits import Pushed
from astraflow_dataflow.store.store import Store
from astraflow_kit.identity.sealing import Session
from astraflow_kit.log import get_logger
from astraflow_kit.metrics import Metrics

log = get_logger(__name__)

_DETAILS = {
    NOT_LEASE_HOLDER: "its `lease_id` is no lease of this task that was given to this node; push what was leased, with "
    "the id of the lease",
    UNKNOWN_ATTEMPT: "its `lease_id` is of another attempt at this task; give the episode `attempt` and `hedge` of its "
    "lease",
    WRONG_SESSION: "it names another node or run than the session that pushes it; leave both out",
}


@dataclass(frozen=True)
class HeldPushes:
    """Takes in what was leased to the session that pushes it."""

    store: Store
    ingest: Ingest
    sessions: CurrentSessions
    metrics: Metrics

    async def push(self, context: RunContext, episodes: Sequence[Episode], *, node: Session) -> list[Pushed]:
        """Return what became of each episode. Raises as `Ingest`, and FencedError for a session that another ended."""
        await self.sessions.require(node)
        reasons = refusals(episodes, LeaseSeals(node, context.seal_key))
        if not any(reasons):
            return await self.ingest.push(context, episodes)
        own = [episode for episode, reason in zip(episodes, reasons, strict=True) if not reason]
        taken = iter(await self.ingest.push(context, own) if own else ())
        await self._note(context, reasons, node=node)
        return [_refused(reason) if reason else next(taken) for reason in reasons]

    async def _note(self, context: RunContext, reasons: Sequence[str], *, node: Session) -> None:
        counted = Counter(filter(None, reasons))
        for reason, number in counted.items():
            self.metrics.increment("astraflow_dataflow_refused_episodes_total", number, reason=reason)
            log.warning("episodes.refused", node_id=node.name, reason=reason, episodes=number)
        await self.store.nodes.note_refused(node, counted)


def _refused(reason: str) -> PushResult:
    return PushResult(outcome=OUTCOME_REFUSED, reason=reason, detail=_DETAILS[reason])
