"""Who was refused lately, and whose token ends soon: what operators see of callers that nobody would hear of otherwise.

Invariant: bounded, whatever strangers send: at most `MAX_KEPT` callers and tokens, the latest. Filled by the server's
guard; a process shows what it refused itself.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from astraflow.errors import AstraflowError
from astraflow_kit.clock import Clock, SystemClock
from astraflow_kit.identity.tokens import ALL, Identity, shown_time
from astraflow_kit.log import get_logger

log = get_logger(__name__)

MAX_KEPT = 64
SHOWN_S = 60.0
"""How long after the last refusal a caller is shown."""
ENDED_SHOWN_S = 3600.0
"""How long a token is shown after its end that a daemon used until then."""
_DAEMONS = frozenset({"rollout", "trainer", "agent"})
"""Roles of who works unwatched; people see themselves that a token of theirs has ended."""
UNPROVEN = "a caller without proof"
"""The subject of whoever has no token that one of the server's keys signed: what it says of itself is not believed."""


@dataclass(kw_only=True)
class Refusal:
    """Calls of one caller that were refused for one reason."""

    subject: str
    reason: str
    runs: frozenset[str]
    """What its token is for; everything for a caller without proof."""
    message: str
    """The newest refusal, with its remedy."""
    first_s: float
    last_s: float
    count: int = 0

    def is_about(self, run_id: str) -> bool:
        """Whether people who watch the run should see it."""
        return ALL in self.runs or run_id in self.runs


class Refusals:
    """The callers that this process refused, and the tokens that it saw and that end soon."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._refused: dict[tuple[str, str], Refusal] = {}
        self._ending: dict[str, Identity] = {}
        self._replaced: set[str] = set()
        """Ids of those whose holder has come with a later one since."""

    def note(self, error: AstraflowError, *, caller: Identity | None = None) -> None:
        """A call was refused. `caller` is whose it is where its token was good; else `error` says what it proved."""
        now_s = self._clock.wall_time_s()
        subject = caller.subject if caller else error.metadata.get("subject", UNPROVEN)
        runs = caller.runs if caller else frozenset(error.metadata.get("runs", ALL).split(","))
        key = subject, error.metadata.get("reason", error.reason)
        found = self._refused.get(key)
        if found is None:
            self._make_room(now_s)
            found = Refusal(
                subject=subject, reason=key[1], runs=runs, message="", first_s=now_s, last_s=now_s
            )
            self._refused[key] = found
        found.last_s, found.message, found.count = now_s, error.message, found.count + 1

    def see(self, identity: Identity) -> None:
        """A call was admitted: remember its token where that ends soon, and no older one of the caller."""
        for held in self._ending.values():
            if held.subject == identity.subject and held.expires_s < identity.expires_s:
                self._replaced.add(held.token_id)
        if identity.token_id and self._clock.wall_time_s() >= identity.warned_from_s:
            if identity.token_id not in self._ending:
                log.warning(
                    "identity.token_ends", subject=identity.subject, at=shown_time(identity.expires_s)
                )
            self._ending[identity.token_id] = identity
            self._replaced.discard(identity.token_id)
            while len(self._ending) > MAX_KEPT:
                self._ending.pop(next(iter(self._ending)))
            self._replaced &= self._ending.keys()

    def refused(self, run_id: str) -> list[Refusal]:
        """Who was refused within the last `SHOWN_S` and concerns the run, the most recent first."""
        since_s = self._clock.wall_time_s() - SHOWN_S
        shown = (item for item in self._refused.values() if item.last_s >= since_s and item.is_about(run_id))
        return sorted(shown, key=lambda item: -item.last_s)

    def ending(self, run_id: str) -> list[Identity]:
        """Whose token ends soon and concerns the run; the first to end first."""
        now_s = self._clock.wall_time_s()
        return [token for token in self._shown(run_id) if token.expires_s > now_s]

    def ended(self, run_id: str) -> list[Identity]:
        """The daemons whose token ended within the last `ENDED_SHOWN_S` and concerns the run; the first first."""
        now_s = self._clock.wall_time_s()
        return [token for token in self._shown(run_id) if token.expires_s <= now_s]

    def next_end_s(self) -> float:
        """When the first of the tokens ends that are shown, in seconds since 1970; 0 without one."""
        return min((token.expires_s for token in self._in_use()), default=0.0)

    def _shown(self, run_id: str) -> list[Identity]:
        shown = (token for token in self._in_use() if token.may_see(run_id))
        return sorted(shown, key=lambda token: token.expires_s)

    def _in_use(self) -> Iterable[Identity]:
        now_s = self._clock.wall_time_s()
        for token in self._ending.values():
            kept_s = ENDED_SHOWN_S if token.roles & _DAEMONS else 0.0
            if token.token_id not in self._replaced and token.expires_s + kept_s > now_s:
                yield token

    def _make_room(self, now_s: float) -> None:
        if len(self._refused) >= MAX_KEPT:
            oldest = min(self._refused, key=lambda key: self._refused[key].last_s)
            del self._refused[oldest]
