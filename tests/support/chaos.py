"""Kills processes of a real run inside named windows, and goes on until everything armed has happened.

A `Kill` names a failpoint, which of its hits counts, and the victim. When the victim is the process that
runs the failpoint, it kills itself there; for any other victim the process stops itself (SIGSTOP) in the
window, the harness kills the victim, and lets it go on. So every kill lands in its window however slow the
machine is. A killed launcher takes everything with it and is started again on the same --data-dir.

`run_kills` drives one run through its windows, `run_random_kills` through random instants, `run_busy_kills` one with
agent programs and a served environment; `Story` says what happened. Used by tests/chaos.
"""

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from astraflow_kit.failpoints import Hit
from astraflow_kit.family import ending_with_us
from astraflow_kit.ports import free_port
from support.development import CHILDREN, ROOT, RunFiles, dev, finish, wait_for

ROLES = (*CHILDREN, "engine", "launcher")
BUSY_ROLES = ("node", "engine", "environment", "agent")
# First part of a failpoint's name -> the role that runs it.
_HOSTS = {"dataflow": "dataflow", "raas": "node", "trainer": "trainer", "engine": "engine"}
_WEIGHTS_HOSTS = {"publish": "trainer", "mirror": "node"}
_ENGINE_MODULE, _SERVER = "-m astraflow_engine", "-m astraflow_dataflow "
_LOOK_S = 0.01
_SERVICE, _AGENT = "-m astraflow_environment", "asking_agent.py"
# A run whose episodes need every kind of process; what is killed costs attempts.
_BUSY = (
    *("--set", "raas.workflow=busy_workflow:Busy", "--set", "dataflow.max_attempts=100"),
    *("--set", "policies.solver.model.architecture.max_position_embeddings=256"),
)
# Until the harness ends the run; the launcher must not take our kills for a broken program.
_ENDLESS = ("--steps", "100000", "--max-restarts", "1000")
_STEPS_AFTER = 2
_WINDOWS_S, _PATIENCE_S, _MEAN_GAP_S = 400.0, 180.0, 2.0
_BUSY_GAP_S = 0.7
# Random kills stop while nothing was trained for this long: a trainer needs seconds to start.
_PAUSE_S = 25.0
# Bytes a random kill of Valkey cuts: mostly nothing (a crash), else what a power cut would lose.
_CUTS = (0, 0, 1, 400)


@dataclass(frozen=True)
class Kill:
    """SIGKILL of `victim` at hit number `nth` of `failpoint`."""

    failpoint: str
    victim: str
    nth: int = 1
    cut_bytes: int = 0
    """Bytes cut from the end of Valkey's append-only file before it starts again: what a power cut loses."""

    @property
    def host(self) -> str:
        """The role that runs the failpoint."""
        first, second, *_ = self.failpoint.split(".")
        return _WEIGHTS_HOSTS[second] if first == "weights" else _HOSTS[first]

    @property
    def clause(self) -> str:
        """How it is armed."""
        return f"{self.failpoint}={'kill' if self.victim == self.host else 'stop'}@{self.nth}"

    def __str__(self) -> str:
        cut = f" cut {self.cut_bytes}" if self.cut_bytes else ""
        return f"{self.failpoint} × {self.victim}{cut}"


@dataclass(frozen=True, kw_only=True)
class Death:
    """One kill that happened: the process that died, and the hit that set it off (none for random kills)."""

    victim: str
    pid: int
    hit: Hit | None = None


@dataclass
class Story:
    """What happened to one run."""

    files: RunFiles
    deaths: list[Death] = field(default_factory=list)
    pids: dict[str, list[int]] = field(default_factory=dict)
    """Every process id a role had, oldest first."""
    lives: int = 1
    """Launchers started."""
    summary: dict[str, Any] = field(default_factory=dict)

    def came_back(self, death: Death) -> bool:
        """Whether the role had another process after the one that died."""
        pids = self.pids.get(death.victim, [])
        return death.pid in pids and pids[-1] != death.pid

    def note(self, role: str, pid: int) -> None:
        """Remember a process of a role."""
        known = self.pids.setdefault(role, [])
        if pid not in known:
            known.append(pid)


class Monkey:
    """Knows the processes of one run and kills them."""

    def __init__(self, story: Story) -> None:
        self.story = story
        self.launcher: subprocess.Popen[str] | None = None
        self.keeper: subprocess.Popen[bytes] | None = None
        """Starts the served environment, again and again."""

    def look(self) -> None:
        """Take in which processes there are."""
        if self.launcher is not None:
            self.story.note("launcher", self.launcher.pid)
        roles = {child: role for role, child in CHILDREN.items()}
        for child, pid in self.story.files.starts():
            self.story.note(roles[child], pid)
        engine = self._engine()
        if engine is not None:
            self.story.note("engine", engine)
        if self.keeper is not None:
            self._look_beside(self.keeper)

    def _look_beside(self, keeper: subprocess.Popen[bytes]) -> None:
        """Take in what the launcher did not start: a service or one of its workers, and one of the agents."""
        node = self.story.pids.get("node", [0])[-1]
        for role, parent, word in (("environment", keeper.pid, _SERVICE), ("agent", node, _AGENT)):
            found = [
                pid
                for pid, words in _below(parent)
                if word in words and not words.startswith("sh ") and "astraflow_kit.family" not in words
            ]
            if found:
                self.story.note(role, random.choice(found))

    def last_words(self) -> str:
        """The end of what the launcher said."""
        return self.story.files.stderr.read_text()[-4000:]

    def require_running(self) -> None:
        """The launcher has not ended by itself."""
        assert self.launcher is not None
        assert self.launcher.poll() is None, f"the launcher ended by itself:\n{self.last_words()}"

    def end_in_order(self) -> bool:
        """Ask the run to end."""
        assert self.launcher is not None
        self.launcher.send_signal(signal.SIGINT)
        return True

    def pid_of(self, role: str) -> int | None:
        """The living process of a role; None while there is none."""
        self.look()
        pids = self.story.pids.get(role, [])
        return pids[-1] if pids and _lives(pids[-1]) else None

    def kill(self, role: str, *, hit: Hit | None = None, cut_bytes: int = 0) -> bool:
        """SIGKILL a role's process, and wait until it is dead; False when there is none. Where it has several, any."""
        pid = self.pid_of(role)
        if pid is None:
            return False
        if role == "dataflow":
            pid = random.choice([pid, *(child for child, words in _below(pid) if _SERVER in words)])
        with self._launcher_frozen(when=bool(cut_bytes)):
            os.kill(pid, signal.SIGKILL)
            self.story.deaths.append(Death(victim=role, pid=pid, hit=hit))
            if role == "launcher":
                self._all_dead()
            else:
                wait_for(lambda: not _lives(pid), what=f"the end of {role} {pid}", period_s=_LOOK_S)
            if cut_bytes:
                cut_tail(self.story.files.data_dir / "redis", cut_bytes)
        return True

    @contextlib.contextmanager
    def _launcher_frozen(self, *, when: bool) -> Iterator[None]:
        """Keep the launcher from starting the victim again meanwhile."""
        if not when or self.launcher is None:
            yield
            return
        self.launcher.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.launcher.send_signal(signal.SIGCONT)

    def _all_dead(self) -> None:
        assert self.launcher is not None
        self.launcher.wait(timeout=30)
        wait_for(lambda: not self.story.files.processes(), what="the end of every child", timeout_s=30)

    def _engine(self) -> int | None:
        found = self.story.files.processes(_ENGINE_MODULE)
        return max((process.pid for process in found), default=None)


def run_kills(folder: Path, kills: Sequence[Kill]) -> Story:
    """Run until every kill happened, its victim came back and a few more steps were taken; then end in order."""
    assert len({kill.failpoint for kill in kills}) == len(kills), "one clause per failpoint and run"
    armed = ";".join(kill.clause for kill in kills)
    director = _Director(Monkey(Story(files=RunFiles(folder))), kills)
    return _lived(director.monkey, director.direct, failpoints=armed)


def run_random_kills(
    folder: Path, *, seed: int, num_kills: int, variables: Mapping[str, str] | None = None
) -> Story:
    """Kill random processes at random instants, all drawn from `seed`; then end the run in order.

    Killing pauses while no step is taken for a while, so that a run cannot be kept from starting at all; one
    that takes no step within `_PATIENCE_S` although nobody kills it is stuck, which is an error.
    """
    monkey, generator = Monkey(Story(files=RunFiles(folder))), random.Random(seed)
    weights = [1 if role == "launcher" else 2 for role in ROLES]
    victims = generator.choices(ROLES, weights=weights, k=num_kills)
    return _lived(monkey, _Dice(monkey, generator, victims).throw, variables=variables)


def run_busy_kills(folder: Path, *, seed: int, kills: Mapping[str, int]) -> Story:
    """The same with agents and a served environment, and as many kills of each of BUSY_ROLES as `kills` says."""
    monkey, generator = Monkey(Story(files=RunFiles(folder))), random.Random(seed)
    victims = [role for role, number in kills.items() for _ in range(number)]
    dice = _Dice(monkey, generator, victims, mean_gap_s=_BUSY_GAP_S)
    with _kept_environment(folder) as (monkey.keeper, address):
        return _lived(monkey, dice.throw, *_BUSY, variables={"ASTRAFLOW_ENVIRONMENTS": f'["Echo={address}"]'})


@contextlib.contextmanager
def _kept_environment(folder: Path) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """Who starts the served environment `Echo` as often as it dies, and its address."""
    port = free_port()
    service = f"{sys.executable} -m astraflow_environment --use support.environments:Echo --port {port}"
    bounds = "--workers 2 --sessions-per-worker 16"
    loop = f"while :; do {service} {bounds}; done"
    paths = os.pathsep.join([str(ROOT / "tests"), *filter(None, sys.path)])
    with (
        (folder / "environment.log").open("ab") as log,
        subprocess.Popen(
            ending_with_us("sh", "-c", loop),
            stderr=log,
            stdout=log,
            env={**os.environ, "PYTHONPATH": paths},
            start_new_session=True,
        ) as keeper,
    ):
        try:
            yield keeper, f"127.0.0.1:{port}"
        finally:
            keeper.send_signal(signal.SIGINT)


def _lived(
    monkey: Monkey,
    drive: Callable[[], bool],
    *arguments: str,
    failpoints: str = "",
    variables: Mapping[str, str] | None = None,
) -> Story:
    """Start the run again as long as `drive` kills its launcher."""
    story = monkey.story
    while not story.summary:
        with dev(
            story.files.folder, *_ENDLESS, *arguments, failpoints=failpoints, variables=variables
        ) as launcher:
            monkey.launcher = launcher
            if drive():
                story.summary = finish(launcher, story.files.folder)
            else:
                story.lives += 1
    return story


class _Dice:
    """Draws when to kill whom, over all lives of one run, until every victim had its turn."""

    def __init__(
        self,
        monkey: Monkey,
        generator: random.Random,
        victims: list[str],
        *,
        mean_gap_s: float = _MEAN_GAP_S,
    ) -> None:
        self.monkey = monkey
        self._mean_gap_s = mean_gap_s
        self._random = generator
        self._left = victims
        self._steps = 0
        self._stepped_s = time.monotonic()

    def throw(self) -> bool:
        """Return True when the run was asked to end in order, False when its launcher was killed."""
        goal = None
        while True:
            time.sleep(min(4 * self._mean_gap_s, self._random.expovariate(1 / self._mean_gap_s)))
            self.monkey.require_running()
            idle_s = self._idle_s()
            assert idle_s < _PATIENCE_S, f"no step for {idle_s:.0f} s:\n{self.monkey.last_words()}"
            if not self._left:
                goal = goal or self._steps + _STEPS_AFTER
                if self._steps >= goal:
                    return self.monkey.end_in_order()
            elif idle_s < _PAUSE_S and self._kill_one() == "launcher":
                return False

    def _kill_one(self) -> str:
        """Kill a random role and return it; empty when it was not alive at this instant."""
        role = self._random.choice(self._left)
        cut = self._random.choice(_CUTS) if role == "valkey" else 0
        if not self.monkey.kill(role, cut_bytes=cut):
            return ""
        self._left.remove(role)
        return role

    def _idle_s(self) -> float:
        steps = self.monkey.story.files.steps_taken()
        if steps > self._steps:
            self._steps, self._stepped_s = steps, time.monotonic()
        return time.monotonic() - self._stepped_s


class _Director:
    """Watches the failpoints' log over all lives of one run."""

    def __init__(self, monkey: Monkey, kills: Sequence[Kill]) -> None:
        self.monkey = monkey
        self._pending = {kill.failpoint: kill for kill in kills}
        self._seen = 0
        self._deadline_s = time.monotonic() + _WINDOWS_S

    def direct(self) -> bool:
        """Return True when the run was asked to end in order, False when its launcher was killed."""
        files, goal = self.monkey.story.files, None
        while time.monotonic() < self._deadline_s:
            self.monkey.require_running()
            if self._act():
                return False
            if not self._pending and self._all_back():
                goal = goal or files.steps_taken() + _STEPS_AFTER
            if goal is not None and files.steps_taken() >= goal:
                return self.monkey.end_in_order()
            time.sleep(_LOOK_S)
        raise AssertionError(
            f"not done in time; not hit: {[str(kill) for kill in self._pending.values()]}; "
            f"deaths: {self.monkey.story.deaths}\n{self.monkey.last_words()}"
        )

    def _act(self) -> bool:
        """Take in new hits; True when one of them was the launcher's end."""
        for hit in self.monkey.story.files.read_hits()[self._seen :]:
            self._seen += 1
            kill = self._pending.get(hit.name)
            if kill is None or not hit.acted:
                continue
            del self._pending[hit.name]
            self._carry_out(kill, hit)
            if kill.victim == "launcher":
                return True
        return False

    def _carry_out(self, kill: Kill, hit: Hit) -> None:
        if kill.victim == kill.host:
            self.monkey.look()
            self.monkey.story.note(kill.victim, hit.pid)
            self.monkey.story.deaths.append(Death(victim=kill.victim, pid=hit.pid, hit=hit))
            return
        wait_for(
            lambda: self.monkey.kill(kill.victim, hit=hit, cut_bytes=kill.cut_bytes),
            what=f"a living {kill.victim} to kill",
            period_s=_LOOK_S,
        )
        with contextlib.suppress(ProcessLookupError):  # it died with the launcher
            os.kill(hit.pid, signal.SIGCONT)

    def _all_back(self) -> bool:
        self.monkey.look()
        story = self.monkey.story
        return all(story.came_back(death) for death in story.deaths)


def cut_tail(redis_folder: Path, num_bytes: int) -> None:
    """Cut bytes from the end of the append-only file: what a power cut would have lost."""
    newest = max((redis_folder / "appendonlydir").glob("*.incr.aof"), key=lambda path: path.stat().st_mtime)
    os.truncate(newest, max(0, newest.stat().st_size - num_bytes))


def _below(pid: int) -> list[tuple[int, str]]:
    """Pids and command lines of what a process started, and of what that did."""
    found: list[tuple[int, str]] = []
    with contextlib.suppress(psutil.NoSuchProcess):
        for process in psutil.Process(pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                found.append((process.pid, " ".join(process.cmdline())))
    return found


def _lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
