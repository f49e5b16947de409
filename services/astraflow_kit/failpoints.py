"""Named places where a test may make a process die, stop, stall or fail.

Invariant: an armed failpoint writes its hit to the log file before it acts, so a test can assert that the
fault it asked for really happened; with nothing armed a hit costs one comparison. Daemon modules call
`hit`, start-up calls `arm` from its settings (`ASTRAFLOW_FAILPOINTS`, `_SEED`, `_LOG`), tests call
`read_hits`.

Spec: `name=action[@nth][%probability]` joined by `;`, such as
`trainer.stepped=kill@3;raas.push=raise%0.1`. Actions: `kill` (SIGKILL self), `stop` (SIGSTOP self),
`raise`, `sleep:SECONDS`, `exit:CODE`. `@nth` acts on the nth hit only (from 1), `%probability` (0 to 1) on
a drawn share of hits. Hits are numbered across restarts that share one log file, so `kill@3` kills once in
a run and the restarted process goes on.
"""

import json
import os
import random
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from astraflow_kit.failpoint_names import KNOWN
from astraflow_kit.nearest import did_you_mean

_NUMBER = r"[0-9]+(?:\.[0-9]+)?"
_CLAUSE = re.compile(
    rf"(?P<name>[a-z0-9_.]+)=(?:(?P<plain>kill|stop|raise)|(?P<timed>sleep):(?P<s>{_NUMBER})|exit:(?P<code>[0-9]+))"
    rf"(?:@(?P<nth>[0-9]+))?(?:%(?P<probability>{_NUMBER}))?"
)


class FailpointSpecError(ValueError):
    """The failpoint spec cannot be understood or names something unknown."""


class FailpointRaised(RuntimeError):
    """Raised by the action `raise`."""


@dataclass(frozen=True, kw_only=True)
class Failpoint:
    """One clause of a spec. `argument` is seconds for `sleep`, the exit code for `exit`, else 0."""

    name: str
    action: str
    argument: float = 0.0
    nth: int | None = None
    probability: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Hit:
    """One line of the log file: the `number`-th hit of `name`; `acted` tells whether its action follows."""

    name: str
    number: int
    action: str
    acted: bool
    pid: int


class _Armed:
    """Counts hits of the armed failpoints, logs them and acts."""

    def __init__(self, points: Mapping[str, Failpoint], *, seed: int, log_path: Path | None) -> None:
        self._points = points
        self._seed = seed
        self._log_path = log_path
        self._lock = threading.Lock()
        self._counts = Counter(hit.name for hit in read_hits(log_path)) if log_path else Counter[str]()

    def hit(self, name: str) -> None:
        point = self._points.get(name)
        if point is None:
            return
        with self._lock:
            self._counts[name] += 1
            number = self._counts[name]
            acted = self._acts(point, number=number)
            self._record(Hit(name=name, number=number, action=point.action, acted=acted, pid=os.getpid()))
        if acted:
            _act(point)

    def _acts(self, point: Failpoint, *, number: int) -> bool:
        if point.nth is not None and number != point.nth:
            return False
        # Drawn from the hit's number: a restarted process continues the series instead of repeating it.
        return random.Random(f"{self._seed}/{point.name}/{number}").random() < point.probability

    def _record(self, hit: Hit) -> None:
        if self._log_path is None:
            return
        line = json.dumps(asdict(hit), separators=(",", ":")) + "\n"
        # One O_APPEND write: whole lines even when several processes share the file, and it survives SIGKILL.
        descriptor = os.open(self._log_path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(descriptor, line.encode())
        finally:
            os.close(descriptor)


_armed: _Armed | None = None


def hit(name: str) -> None:
    """Mark that execution reached `name`; acts only when a test armed it. Blocks the caller for `sleep`."""
    if _armed is not None:
        _armed.hit(name)


def arm(spec: str, *, seed: int = 0, log_path: Path | None = None, known: Mapping[str, str] = KNOWN) -> None:
    """Arm the failpoints of `spec` in this process, replacing what was armed; an empty spec disarms.

    Raises FailpointSpecError, naming the clause and the nearest known name.
    """
    global _armed
    points = parse(spec, known=known)
    _armed = _Armed(points, seed=seed, log_path=log_path) if points else None


def parse(spec: str, *, known: Mapping[str, str] = KNOWN) -> dict[str, Failpoint]:
    """Read a spec string without arming it. Raises FailpointSpecError."""
    points: dict[str, Failpoint] = {}
    for clause in filter(None, (part.strip() for part in spec.split(";"))):
        point = _parse_clause(clause)
        if point.name not in known:
            raise FailpointSpecError(f"unknown failpoint {point.name!r}. {did_you_mean(point.name, known)}")
        if point.name in points:
            raise FailpointSpecError(f"failpoint {point.name!r} is given twice; keep one clause per name")
        points[point.name] = point
    return points


def read_hits(log_path: Path) -> list[Hit]:
    """All hits recorded so far, oldest first; empty when the file does not exist."""
    if not log_path.exists():
        return []
    # A reader may see the first page of a line before the next: what has no end yet is not recorded yet.
    whole, _, _ = log_path.read_text().rpartition("\n")
    return [Hit(**json.loads(line)) for line in whole.splitlines()]


def _parse_clause(clause: str) -> Failpoint:
    match = _CLAUSE.fullmatch(clause)
    if match is None:
        form = "name=action[@nth][%probability]; actions: kill, stop, raise, sleep:SECONDS, exit:CODE"
        raise FailpointSpecError(f"failpoint clause {clause!r} is not {form}")
    nth = int(match["nth"]) if match["nth"] else None
    probability = float(match["probability"] or 1)
    if nth == 0 or not 0.0 < probability <= 1.0:
        bounds = "nth counts from 1, probability is above 0 and at most 1"
        raise FailpointSpecError(f"failpoint clause {clause!r} is out of bounds: {bounds}")
    return Failpoint(
        name=match["name"],
        action=match["plain"] or match["timed"] or "exit",
        argument=float(match["s"] or match["code"] or 0),
        nth=nth,
        probability=probability,
    )


def _act(point: Failpoint) -> None:
    if point.action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif point.action == "stop":
        # To this thread: one sent to the process may stop it only after this thread went on for a while.
        signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
    elif point.action == "sleep":
        time.sleep(point.argument)
    elif point.action == "exit":
        os._exit(int(point.argument))
    else:
        raise FailpointRaised(f"failpoint {point.name!r} raised as armed")
