"""Children are restarted, refused, stopped, and never outlive the launcher."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from astraflow.errors import InternalError, InvalidArgumentError, UnavailableError
from astraflow_kit.lifecycle import ExitCode
from astraflow_launcher.run.processes import ChildSpec, Supervisor
from support.development import wait_for
from support.scripted_dataflow import eventually

pytestmark = pytest.mark.slow

SLEEPS = "import time; time.sleep(60)"


def _spec(folder: Path, code: str, *, name: str = "child", **fields: object) -> ChildSpec:
    argv = (sys.executable, "-c", code)
    return ChildSpec(name=name, argv=argv, log_path=folder / f"{name}.log", **fields)  # type: ignore[arg-type]


DIES_ONCE = (
    "import pathlib, sys; seen = (p := pathlib.Path('{marker}')).exists(); p.touch(); sys.exit(not seen)"
)


@pytest.mark.parametrize(("code", "restarts"), [("pass", 0), (DIES_ONCE, 1)], ids=["status 0", "status 1"])
async def test_a_child_is_started_again_until_it_ends_with_status_0(
    tmp_path: Path, code: str, restarts: int
) -> None:
    async with Supervisor() as supervisor:
        child = await supervisor.start(_spec(tmp_path, code.format(marker=tmp_path / "second-life")))
        await child.finished.wait()
        assert (child.exit_code, child.restarts) == (0, restarts)


async def test_a_killed_child_is_started_again(tmp_path: Path) -> None:
    async with Supervisor(stop_grace_s=1) as supervisor:
        child = await supervisor.start(_spec(tmp_path, SLEEPS))
        await eventually(lambda: child.running, what="it runs")
        assert child.process is not None
        first = child.process.pid
        os.kill(first, signal.SIGKILL)
        await eventually(
            lambda: child.running and child.process is not None and child.process.pid != first, what="it runs"
        )
        assert child.restarts == 1


@pytest.mark.parametrize(
    ("code", "kind"), [(ExitCode.USAGE, InvalidArgumentError), (ExitCode.SUPERSEDED, InternalError)]
)
async def test_wrong_settings_and_superseded_children_are_fatal_and_show_the_log(
    tmp_path: Path, code: ExitCode, kind: type[Exception]
) -> None:
    text = f"import sys; print('port 7 is taken', file=sys.stderr); sys.exit({int(code)})"
    async with Supervisor() as supervisor:
        child = await supervisor.start(_spec(tmp_path, text))
        await child.finished.wait()
        await asyncio.sleep(0)
        with pytest.raises(kind, match="port 7 is taken"):
            supervisor.raise_failures()
        assert child.restarts == 0


async def test_a_child_that_keeps_dying_is_given_up(tmp_path: Path) -> None:
    async with Supervisor() as supervisor:
        child = await supervisor.start(_spec(tmp_path, "raise SystemExit(1)", max_restarts=1))
        await child.finished.wait()
        await asyncio.sleep(0)
        with pytest.raises(InternalError, match="ended with status 1"):
            supervisor.raise_failures()
        assert child.restarts == 1


async def test_a_child_that_never_becomes_ready_is_reported_with_its_log(tmp_path: Path) -> None:
    spec = _spec(
        tmp_path, f"print('still thinking', flush=True); {SLEEPS}", address_file=tmp_path / "address.json"
    )
    async with Supervisor(stop_grace_s=1) as supervisor:
        child = await supervisor.start(spec)
        with pytest.raises(UnavailableError, match="did not become ready"):
            await supervisor.wait_ready(child, timeout_s=0.3)


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
        first = await supervisor.start(
            _spec(tmp_path, SLEEPS, name="first", group="trainer", group_grace_s=0.2)
        )
        second = await supervisor.start(_spec(tmp_path, SLEEPS, name="second", group="trainer"))
        alone = await supervisor.start(_spec(tmp_path, SLEEPS, name="alone"))
        await eventually(lambda: first.running and second.running and alone.running, what="it runs")
        before = [child.process.pid for child in (first, second, alone) if child.process is not None]
        os.kill(before[0], signal.SIGKILL)
        await eventually(
            lambda: (first.restarts, second.restarts) == (1, 1) and first.running and second.running,
            what="it runs",
        )
        after = [child.process.pid for child in (first, second, alone) if child.process is not None]
        assert (after[0] == before[0], after[1] == before[1], after[2] == before[2]) == (False, False, True)
