"""A Redis that loses what it had under a run that trains: the launch ends, says so and destroys nothing, and goes on by
the same command once Redis has its data again.
"""

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import redis

from astraflow_kit.lifecycle import ExitCode
from support.audit import audit
from support.development import RUN_ID, RunFiles, dev, finish, wait_for
from support.gray.life import Lived, Row, line_with
from support.gray.resume import PATIENCE_S, Talk

_FIRST_STEPS, _STEPS_EACH = 3, 2
_BEYOND_S = 8.0
"""More than a Redis may lose when it dies."""


class LivingRedis:
    """The Redis of a run that `launcher` runs. `kept` is a copy of its data as they were before the loss."""

    def __init__(self, files: RunFiles, launcher: "subprocess.Popen[str]") -> None:
        self.folder = files.data_dir / "redis"
        self.kept = files.folder / "redis-kept"
        self._files = files
        self._launcher = launcher
        self._process = psutil.Process(dict(files.starts())["redis"])
        [server] = files.processes("-m astraflow_dataflow")
        words = server.cmdline()
        self._address = words[words.index("--redis") + 1]

    def empty(self) -> None:
        """FLUSHALL, as by somebody who took it for another one."""
        self._copy_to(self.kept)
        with self._client() as client:
            client.flushall()

    def set_back(self) -> None:
        """It starts again over data of more steps ago than it may lose."""
        old, steps, began_s = self._files.folder / "redis-old", self._files.steps_taken(), time.monotonic()
        self._copy_to(old)
        wait_for(
            lambda: self._files.steps_taken() >= steps + 4 and time.monotonic() - began_s >= _BEYOND_S,
            what="more than it may lose",
        )
        self._launcher.send_signal(signal.SIGSTOP)  # it would start Redis again meanwhile
        try:
            os.kill(self._process.pid, signal.SIGKILL)
            wait_for(lambda: not _lives(self._process), what="its end")
            _replace(self.kept, self.folder)
            _replace(self.folder, old)
        finally:
            self._launcher.send_signal(signal.SIGCONT)

    def restore(self) -> None:
        """Put back what it had; nobody runs."""
        _replace(self.folder, self.kept)

    def _copy_to(self, folder: Path) -> None:
        with self._client() as client:
            client.client_pause(60_000, all=False)
            try:
                _replace(folder, self.folder)
            finally:
                client.client_unpause()

    def _client(self) -> "redis.Redis":
        return redis.Redis.from_url(self._address, socket_timeout=10)


@dataclass(frozen=True, kw_only=True)
class Loss:
    """One row of the table."""

    name: str
    done: Callable[[LivingRedis], None]
    said: tuple[str, ...]
    """One of these must be said by the launcher, or stand in a log."""
    status: ExitCode = ExitCode.SUPERSEDED
    """How the launch must end: no start of a process, nor of the launch, helps before Redis has its data again."""
    loop: str = "Redis loses data"


LOSSES = (
    Loss(name="Redis emptied under a run", done=LivingRedis.empty, said=("no run 'quickstart'",)),
    Loss(name="Redis set back under a run", done=LivingRedis.set_back, said=("Redis is older than the",)),
)


def live_through(folder: Path, losses: Sequence[Loss]) -> Lived:
    """Train below `folder` and lose data, loss after loss."""
    folder.mkdir(parents=True, exist_ok=True)
    files = RunFiles(folder)
    rows = [_meet(loss, files) for loss in losses]
    found = audit(folder)
    return Lived(rows, found.violations, found.figures)


def _meet(loss: Loss, files: RunFiles) -> Row:
    row, steps = Row(loss.name), files.steps_taken() + _FIRST_STEPS
    with dev(files.folder, "--steps", "100000") as launcher:
        wait_for(
            lambda: files.steps_taken() >= steps or launcher.poll() is not None,
            what="some steps",
            timeout_s=PATIENCE_S,
        )
        living, talk = LivingRedis(files, launcher), Talk(files)
        before = _stored(files)
        loss.done(living)
        began_s = time.monotonic()
        while (status := launcher.poll()) is None and time.monotonic() - began_s < PATIENCE_S:
            if not row.lines_said and (line := line_with(loss.said, talk.text())):
                row.lines_s, row.lines_said = time.monotonic() - began_s, line
            time.sleep(0.1)
        row.lasted_s = time.monotonic() - began_s
    row.lines_said = row.lines_said or line_with(loss.said, talk.text())
    if not row.lines_said:
        row.wrong.append(f"nobody said any of {loss.said}, but:\n{talk.complaints()}")
    if status != loss.status:
        row.wrong.append(f"the launch ended with status {status}:\n{talk.text()[:2500]}")
    after = _stored(files)
    if destroyed := [name for name, content in before.items() if after.get(name) != content]:
        row.wrong.append(f"changed or deleted: {destroyed[:5]}")
    living.restore()
    began_s, steps = time.monotonic(), files.steps_taken() + _STEPS_EACH
    with dev(files.folder, "--steps", str(steps)) as launcher:
        finish(launcher, files.folder, timeout_s=PATIENCE_S)
    row.recovered_s = time.monotonic() - began_s
    return row


def _stored(files: RunFiles) -> dict[str, bytes]:
    """What the store has of versions: nothing of it may be changed."""
    root = files.data_dir / "store" / RUN_ID
    paths = [path for name in ("seq", "parts") for path in root.glob(f"*/{name}/*") if path.is_file()]
    return {str(path): path.read_bytes() for path in paths}


def _replace(folder: Path, content: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(content, folder)


def _lives(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
