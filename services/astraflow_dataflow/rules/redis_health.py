"""What the server's Redis lacks, as waits that a person can act on.

Pure: `RedisHealth` is given what each probe found and says what is wrong now, since when, with the figures. Times are
seconds of the server's clock. Fed by the watch of status; shown by Status and `why`.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from astraflow_dataflow.rules.waits import Wait

SLOW_S = 0.25
SLOW_PROBES = 5
"""Redis is slow when so many probes in a row took `SLOW_S` or longer."""

JUMP_MS = 15_000
_STAGE = "data"
REDIS_RELEASES = {
    "redis_silent": "start it again, or bring the network to it back; the server goes on by itself, and meanwhile "
    "nodes keep what they finish and trainers wait",
    "redis_read_only": "give the server the address of the primary (--redis), or make this one the primary (REPLICAOF "
    "NO ONE); callers repeat what was refused",
    "redis_disk_full": "make room on its disk, or mend the mode of its folder; it tries again by itself, and callers "
    "repeat what was refused",
    "redis_full": "give it more memory (CONFIG SET maxmemory); trainers go on, and what they train on makes room",
    "redis_slow": "look at its machine (memory that is swapped, a slow disk under appendfsync) and at SLOWLOG GET",
}
"""Of the server's Redis: what ends the wait of each reason."""

PAYLOAD_RELEASES = {
    "payloads_away": "start it again, or bring the network to it back; the server goes on by itself, and meanwhile "
    "nodes keep what they finish and trainers wait",
    "payloads_lost": "restore it from its backup, or give the server the address of the one that holds them "
    "(--payloads); what nodes still hold they push again by themselves; a batch that needs the rest is discarded by "
    "VoidBatch",
}
"""Of where payloads are kept outside: what ends the wait of each reason."""


@dataclass
class RedisHealth:
    """What the newest probes say."""

    address: str
    problem: Wait | None = None
    _since: tuple[str, float] = ("", 0.0)
    _latencies_s: deque[float] = field(default_factory=lambda: deque(maxlen=SLOW_PROBES))

    def answered(
        self,
        latency_s: float,
        *,
        now_s: float,
        refused_as: str = "",
        figures: Mapping[str, str] | None = None,
    ) -> None:
        """A probe was answered; `refused_as` is the reason when Redis refused to write, with its own figures."""
        self._latencies_s.append(latency_s)
        is_slow = len(self._latencies_s) == SLOW_PROBES and min(self._latencies_s) >= SLOW_S
        if refused_as:
            self._note(refused_as, _refusal(refused_as, figures or {}), now_s=now_s)
        elif is_slow:
            least_s = min(self._latencies_s)
            detail = f"the last {SLOW_PROBES} probes took {least_s:.2f} s or more, the bound is {SLOW_S:g} s"
            self._note("redis_slow", detail, now_s=now_s)
        else:
            self.problem, self._since = None, ("", 0.0)

    def silent(self, silent_s: float, why: str, *, now_s: float) -> None:
        """No probe has been answered for `silent_s`."""
        self._latencies_s.clear()
        if self._since[0] != "redis_silent":
            self._since = ("redis_silent", now_s - silent_s)
        age_s = now_s - self._since[1]
        detail = f"no answer for {age_s:.0f} s: {why}; what stands beside this was read before"
        self._note("redis_silent", detail, now_s=now_s)

    def _note(self, reason: str, detail: str, *, now_s: float) -> None:
        if self._since[0] != reason:
            self._since = (reason, now_s)
        self.problem = Wait(
            stage=_STAGE,
            reason=reason,
            detail=f"Redis at {self.address}: {detail}",
            released_by=REDIS_RELEASES[reason],
            since_ms=int(self._since[1] * 1000),
        )


@dataclass
class ClockJumps:
    """Notices when Redis' wall clock was set: ages by it then say nothing of the time that passed."""

    jumped_ms: int = 0
    """What that clock said after its last jump; 0 when it never jumped."""
    _offset_ms: float | None = None

    def look(self, redis_ms: int, *, monotonic_s: float) -> None:
        """Redis says that it is `redis_ms`; an answer that came late by less than `JUMP_MS` is no jump."""
        offset_ms = redis_ms - 1000 * monotonic_s
        if self._offset_ms is not None and abs(offset_ms - self._offset_ms) > JUMP_MS:
            self.jumped_ms = redis_ms
        self._offset_ms = offset_ms


def _refusal(reason: str, figures: Mapping[str, str]) -> str:
    def figure(name: str) -> str:
        return figures.get(name) or "?"

    if reason == "redis_full":
        used, most = figure("used_memory_human"), figure("maxmemory_human")
        return f"{used} of memory are used, maxmemory is {most}: it refuses what needs more"
    if reason == "redis_disk_full":
        states = f"aof_last_write_status {figure('aof_last_write_status')}, rdb_last_bgsave_status "
        return f"it cannot write its files and refuses writes ({states}{figure('rdb_last_bgsave_status')})"
    if figures.get("role") == "slave":
        primary = f"{figure('master_host')}:{figure('master_port')}, link {figure('master_link_status')}"
        return f"it is a read-only replica of {primary}"
    return f"it refuses writes as too few replicas are connected ({figure('connected_slaves')})"
