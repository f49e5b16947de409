"""Whether the session of a node goes on, or a newer one of its name has ended it.

Invariant: a session that was ended is refused within `_LOOK_LIFE_S` by every server; what a node sends in that time
costs one look, so that a push has no Redis command of its own. One per process, made by `server`.
"""

import asyncio
from dataclasses import dataclass, field

from astraflow.errors import FencedError
from astraflow_dataflow.store.runs import NodeStore
from astraflow_kit.identity.sealing import Session

_LOOK_LIFE_S = 2.0
_MOST_KEPT = 4096


@dataclass(frozen=True)
class CurrentSessions:
    """The sessions that were found to go on."""

    nodes: NodeStore
    _good_until_s: dict[Session, float] = field(default_factory=dict, repr=False)

    async def require(self, session: Session) -> None:
        """Raise FencedError, with the metadata `reason` `session_ended`, where a newer session of the name is there."""
        now_s = asyncio.get_running_loop().time()
        if self._good_until_s.get(session, 0.0) > now_s:
            return
        if len(self._good_until_s) >= _MOST_KEPT:
            self._good_until_s.clear()
        if await self.nodes.has_ended(session):
            raise FencedError(
                f"node {session.name} has joined again since it was given number {session.number}; another process "
                "uses its name",
                metadata={"reason": "session_ended"},
            )
        self._good_until_s[session] = now_s + _LOOK_LIFE_S
