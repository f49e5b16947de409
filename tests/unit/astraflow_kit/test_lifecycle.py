"""Daemon processes: drain on the first signal, hard stop on the second, exit codes, address file, parent
death."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from astraflow import errors
from astraflow_kit import failpoint_names, failpoints, lifecycle, ports
from astraflow_kit.lifecycle import Addresses, ExitCode, Lifecycle, run_services

_DAEMON = """
import asyncio, sys
from astraflow_kit import lifecycle, log

log.configure("test", log_format="json")

async def polite(life):
    print("up", flush=True)
    await life.drain.wait()

async def stubborn(life):
    print("up", flush=True)
    await life.drain.wait()
    print("draining", flush=True)
    await asyncio.Event().wait()

async def begun(life):
    from astraflow_kit import failpoints
    from astraflow_kit.settings import DaemonSettings, load
    lifecycle.begin("begun", load(DaemonSettings, {"log_format": "json"}))
    failpoints.hit(sorted(failpoints.KNOWN)[0])

sys.exit(lifecycle.run(globals()[sys.argv[1]], drain_timeout_s=float(sys.argv[2])))
"""


def _daemon(kind: str, *, drain_timeout_s: float = 60.0) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", _DAEMON, kind, str(drain_timeout_s)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def _signalled(kind: str, number: signal.Signals = signal.SIGTERM, **options: float) -> subprocess.Popen[str]:
    """A daemon that was told to drain once it was up."""
    child = _daemon(kind, **options)
    assert _said(child) == "up"
    child.send_signal(number)
    return child


def _said(child: subprocess.Popen[str]) -> str:
    assert child.stdout is not None
    return child.stdout.readline().strip()


def _ended(child: subprocess.Popen[str]) -> tuple[int, list[str]]:
    _, stderr = child.communicate(timeout=60)
    return child.returncode, [json.loads(line)["event"] for line in stderr.splitlines()]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_drains(number: signal.Signals) -> None:
    assert _ended(_signalled("polite", number)) == (ExitCode.OK, ["daemon.draining", "daemon.ended"])


def test_the_second_signal_stops_at_once() -> None:
    child = _signalled("stubborn")
    assert _said(child) == "draining"
    child.send_signal(signal.SIGTERM)
    code, events = _ended(child)
    assert code == ExitCode.HARD_STOP
    assert "daemon.stopped_hard" in events


def test_a_drain_that_takes_too_long_is_stopped() -> None:
    assert _ended(_signalled("stubborn", drain_timeout_s=0.1))[0] == ExitCode.DRAIN_TIMEOUT


def test_begin_arms_what_the_environment_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = sorted(failpoint_names.KNOWN)[0]
    monkeypatch.setenv("ASTRAFLOW_FAILPOINTS", f"{name}=exit:9")
    monkeypatch.setenv("ASTRAFLOW_FAILPOINTS_LOG", str(tmp_path / "hits"))
    assert _ended(_daemon("begun"))[0] == 9
    assert [hit.name for hit in failpoints.read_hits(tmp_path / "hits")] == [name]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (RuntimeError("defect"), ExitCode.FAILED),
        (errors.InternalError("theirs"), ExitCode.FAILED),
        (ports.PortError("taken"), ExitCode.USAGE),
        (errors.RecipeError("wrong key"), ExitCode.USAGE),
        (errors.UnauthenticatedError("unknown token"), ExitCode.USAGE),
        (errors.PermissionError_("for trainers"), ExitCode.USAGE),
        (errors.UnimplementedError("not yet"), ExitCode.USAGE),
        (errors.FencedError("epoch 2 rules"), ExitCode.SUPERSEDED),
        (errors.UnavailableError("no redis"), ExitCode.UNAVAILABLE),
        (ExceptionGroup("group", [ExceptionGroup("inner", [errors.FencedError("x")])]), ExitCode.SUPERSEDED),
    ],
)
def test_the_exit_code_tells_the_kind_of_failure(error: Exception, code: ExitCode) -> None:
    async def main(_life: Lifecycle) -> None:
        raise error

    assert lifecycle.run(main) == code


class Recorder:
    """A service that writes down what happens to it."""

    def __init__(self, name: str, events: list[str], *, fails: str = "", ends: bool = False) -> None:
        self.name, self.events, self.fails, self.ends = name, events, fails, ends
        self.stopped = asyncio.Event()

    async def start(self) -> None:
        self.events.append(f"start {self.name}")
        if self.fails == "start":
            raise errors.UnavailableError(self.name)

    async def run(self) -> None:
        if self.fails == "run":
            raise errors.FencedError(self.name)
        if not self.ends:
            await self.stopped.wait()
        self.events.append(f"ran {self.name}")

    async def stop(self, *, deadline_s: float) -> None:
        assert 0 < deadline_s <= 5
        self.events.append(f"stop {self.name}")
        self.stopped.set()


async def _serve(*services: Recorder, drain: bool = False) -> None:
    life = Lifecycle(drain_timeout_s=5.0)
    if drain:
        asyncio.get_running_loop().call_soon(life.begin_drain)
    async with asyncio.timeout(10):
        await run_services(services, lifecycle=life, on_started=lambda: services[0].events.append("started"))


async def test_services_start_in_order_and_stop_in_reverse() -> None:
    events: list[str] = []
    await _serve(Recorder("a", events), Recorder("b", events), drain=True)
    assert events[:5] == ["start a", "start b", "started", "stop b", "stop a"]
    assert set(events[5:]) == {"ran a", "ran b"}


async def test_a_service_that_is_done_drains_the_others() -> None:
    events: list[str] = []
    await _serve(Recorder("a", events), Recorder("b", events, ends=True))
    assert events[-1] == "ran a"
    assert "stop a" in events


async def test_a_service_that_fails_stops_the_others_and_is_reported() -> None:
    events: list[str] = []
    with pytest.raises(ExceptionGroup) as caught:
        await _serve(Recorder("a", events), Recorder("b", events, fails="run"))
    assert caught.group_contains(errors.FencedError, match="b")
    assert "stop a" in events


async def test_a_service_that_cannot_start_stops_those_before_it_only() -> None:
    events: list[str] = []
    with pytest.raises(ExceptionGroup) as caught:
        await _serve(Recorder("a", events), Recorder("b", events, fails="start"), Recorder("c", events))
    assert caught.group_contains(errors.UnavailableError)
    assert events == ["start a", "start b", "stop a"]


def test_an_address_file_is_whole_and_leaves_no_draft(tmp_path: Path) -> None:
    path = tmp_path / "address"
    assert lifecycle.read_address_file(path) is None
    addresses = Addresses(pid=os.getpid(), grpc="127.0.0.1:7070", http="127.0.0.1:8080")
    lifecycle.write_address_file(path, addresses)
    assert lifecycle.read_address_file(path) == addresses
    assert list(tmp_path.iterdir()) == [path]


FAILED = '{"event": "daemon.failed", "reason": "INVALID_MODEL", "message": "no Gemma"}'
LOGS = [
    (['{"event": "started"}', FAILED, "a line of a library"], ("INVALID_MODEL", "no Gemma")),
    ([FAILED, '{"event": "daemon.failed", "exception": "Traceback"}'], None),
    (["[1, 2]", "12:00 daemon.failed reason=INVALID_MODEL"], None),
    ([], None),
]


@pytest.mark.parametrize(("lines", "failure"), LOGS, ids=["said", "a defect", "not JSON", "empty"])
def test_the_end_of_a_log_says_why_a_daemon_failed(lines: list[str], failure: tuple[str, str] | None) -> None:
    assert lifecycle.failure_in(lines) == failure
