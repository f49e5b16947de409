"""Children are restarted, refused, stopped, and never outlive the launcher."""

import asyncio
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import psutil
import pytest

from astraflow.errors import InternalError, InvalidArgumentError, PreconditionError, UnavailableError
from astraflow_kit.lifecycle import ExitCode
from astraflow_launcher.run.processes import Child, ChildSpec, Supervisor
from support.development import wait_for
from support.scripted_dataflow import eventually

pytestmark = pytest.mark.slow

SLEEPS = "import time; time.sleep(60)"


def _spec(folder: Path, code: str, *, name: str = "child", **fields: object) -> ChildSpec:
    argv = (sys.executable, "-c", code)
    return ChildSpec(name=name, argv=argv, log_path=folder / f"{name}.log", **fields)  # type: ignore[arg-type]


def _pid(child: Child) -> int:
    assert child.process is not None
    return child.process.pid


DIES_ONCE = "import os, sys; seen = os.path.exists({0!r}); open({0!r}, 'a'); sys.exit(not seen)"


@pytest.mark.parametrize(("code", "restarts"), [("pass", 0), (DIES_ONCE, 1)], ids=["status 0", "status 1"])
async def test_a_child_is_started_until_it_ends_with_status_0(
    tmp_path: Path, code: str, restarts: int
) -> None:
    async with Supervisor() as supervisor:
        child = await supervisor.start(_spec(tmp_path, code.format(f"{tmp_path}/second-life")))
        await child.finished.wait()
        assert (child.exit_code, child.restarts) == (0, restarts)


async def test_a_killed_child_is_started_again(tmp_path: Path) -> None:
    async with Supervisor(stop_grace_s=1) as supervisor:
        child = await supervisor.start(_spec(tmp_path, SLEEPS))
        await eventually(lambda: child.running, what="it runs")
        first = _pid(child)
        os.kill(first, signal.SIGKILL)
        await eventually(lambda: child.running and _pid(child) != first, what="it runs")
        assert child.restarts == 1
        assert child.last_end == f"status -9, see {child.spec.log_path}"


STANDS_STILL = """
import re
from pathlib import Path
from astraflow_kit.lifecycle import Addresses, begin, write_address_file
from astraflow_kit.settings import ProcessSettings

def reward(holds_the_interpreter):
    re.match("(a+)+$", "a" * 64 + "b")

begin("child", ProcessSettings())
write_address_file(Path({0!r}), Addresses())
reward(True)
"""


async def test_a_process_that_is_replaced_has_said_what_it_stood_still_in(tmp_path: Path) -> None:
    addresses, code = tmp_path / "addresses.json", tmp_path / "recipe.py"
    code.write_text(STANDS_STILL.format(str(addresses)))
    spec = ChildSpec(
        name="child",
        argv=(sys.executable, str(code)),
        log_path=tmp_path / "log",
        address_file=addresses,
    )
    async with Supervisor(stop_grace_s=0.1) as supervisor:
        child = await supervisor.start(spec)
        await eventually(lambda: child.addresses is not None, what="it runs")
        child.replace()
        child.replace()
        await eventually(lambda: child.restarts == 1, what="it is replaced")
        assert child.last_end == f"status -9, it stood still in reward (recipe.py:8), see {spec.log_path}"


@pytest.mark.parametrize(
    ("status", "restarts", "kind", "words"),
    [
        (ExitCode.USAGE, 0, InvalidArgumentError, "port 7 is taken"),
        (ExitCode.SUPERSEDED, 0, PreconditionError, "port 7 is taken"),
        (1, 1, InternalError, "ended with status 1"),
    ],
    ids=["wrong settings", "superseded", "dies again"],
)
async def test_a_child_that_cannot_go_on_is_fatal_and_shows_the_log(
    tmp_path: Path, status: int, restarts: int, kind: type[Exception], words: str
) -> None:
    code = f"import sys; print('port 7 is taken', file=sys.stderr); sys.exit({int(status)})"
    async with Supervisor() as supervisor:
        child = await supervisor.start(_spec(tmp_path, code, max_restarts=1))
        await child.finished.wait()
        await asyncio.sleep(0)
        with pytest.raises(kind, match=words):
            supervisor.raise_failures()
        assert child.restarts == restarts


async def test_a_child_that_says_why_it_ended_is_quoted_without_the_rest_of_its_log(tmp_path: Path) -> None:
    failed = {"event": "daemon.failed", "reason": "INVALID_MODEL", "message": "no Gemma; --engine sglang"}
    code = f"import json, sys; print('much'); print(json.dumps({failed})); sys.exit(2)"
    async with Supervisor() as supervisor:
        child = await supervisor.start(_spec(tmp_path, code))
        await child.finished.wait()
        await asyncio.sleep(0)
        with pytest.raises(
            InvalidArgumentError, match=r"started again: INVALID_MODEL: no Gemma; --engine sglang\nIts log: /"
        ):
            supervisor.raise_failures()


async def test_a_child_that_never_becomes_ready_is_reported_with_its_log(tmp_path: Path) -> None:
    code = f"print('still thinking', flush=True); {SLEEPS}"
    spec = _spec(tmp_path, code, address_file=tmp_path / "address.json")
    async with Supervisor(stop_grace_s=1) as supervisor:
        child = await supervisor.start(spec)
        with pytest.raises(UnavailableError, match="did not become ready"):
            await supervisor.wait_ready(child, timeout_s=0.3)


async def test_a_child_that_is_stopped_between_two_lives_stays_down(tmp_path: Path) -> None:
    async with Supervisor() as supervisor:
        child = await supervisor.start(_spec(tmp_path, "print('lived'); raise SystemExit(1)"))
        await eventually(lambda: child.restarts == 4, what="it waits for its fifth life")
        await supervisor.stop("child")
        assert child.finished.is_set()
    assert (tmp_path / "child.log").read_text().count("lived") == 4


async def test_stopping_ends_a_child_that_ignores_the_signal_and_its_grandchildren(tmp_path: Path) -> None:
    code = (
        "import signal, subprocess, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
        f"print(subprocess.Popen([sys.executable, '-c', {SLEEPS!r}]).pid, flush=True); time.sleep(60)"
    )
    async with Supervisor(stop_grace_s=0.5) as supervisor:
        child = await supervisor.start(_spec(tmp_path, code))
        log = tmp_path / "child.log"
        await eventually(lambda: log.exists() and bool(log.read_text().strip()), what="it runs")
        grandchild = int(log.read_text())
        await supervisor.stop("child")
        assert not child.running
    await eventually(lambda: _gone(grandchild), what="the grandchild ends")


def test_children_die_when_the_launcher_is_killed(tmp_path: Path) -> None:
    code = f"""
import asyncio, pathlib
from astraflow_launcher.run.processes import ChildSpec, Supervisor
async def main():
    async with Supervisor() as supervisor:
        folder = pathlib.Path({str(tmp_path)!r})
        argv = ({sys.executable!r}, "-c", {SLEEPS!r})
        spec = ChildSpec(name="c", argv=argv, log_path=folder / "c.log")
        child = await supervisor.start(spec)
        while not child.running:
            await asyncio.sleep(0.02)
        (folder / "pid").write_text(str(child.process.pid))
        await asyncio.sleep(60)
asyncio.run(main())
"""
    note = tmp_path / "pid"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.DEVNULL) as launcher:
        wait_for(lambda: note.exists() and note.read_text(), what="the child's pid")
        child = int(note.read_text())
        assert psutil.pid_exists(child)
        launcher.kill()
    wait_for(lambda: _gone(child), what="the end of the child")


def _gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


async def test_children_of_a_group_end_and_start_again_together(tmp_path: Path) -> None:
    """One of them ignores that the other died: it is ended too."""
    async with Supervisor(stop_grace_s=1) as supervisor:
        sleeping = partial(_spec, tmp_path, SLEEPS)
        first = await supervisor.start(sleeping(name="first", group="trainer", group_grace_s=0.2))
        second = await supervisor.start(sleeping(name="second", group="trainer"))
        alone = await supervisor.start(sleeping(name="alone"))
        await eventually(lambda: first.running and second.running and alone.running, what="it runs")
        before = [_pid(child) for child in (first, second, alone)]
        os.kill(before[0], signal.SIGKILL)
        both = (first, second)
        await eventually(lambda: all(one.restarts == 1 and one.running for one in both), what="it runs")
        after = [_pid(child) for child in (first, second, alone)]
        assert [one == other for one, other in zip(before, after, strict=True)] == [False, False, True]
