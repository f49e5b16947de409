"""One run of an engine as a child: healthy, dead early, ended with its whole group. The child is a small stand-in."""

import sys
from pathlib import Path
from unittest.mock import Mock

import psutil
import pytest

from astraflow_raas.engine.base import EngineUnavailable
from astraflow_raas.engine.process import EngineProcess, start_engine
from astraflow_raas.engine.server_info import EngineUnsuitable
from support.scripted_dataflow import eventually

HEALTHY = """
import http.server, subprocess, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
    def log_message(self, *_): pass
helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
DIES = "import sys; print('loading'); sys.exit('no such model')"
STUBBORN = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + HEALTHY


async def started(program: str, folder: Path, *arguments: str) -> EngineProcess:
    command = Mock(kind="stand-in", environment=dict, key_file_content=str)
    command.argv = lambda *, port, **_: [sys.executable, "-c", program, str(port), *arguments]
    log_path = folder / "engine.log"
    return await start_engine(command, model_dir=folder, version=0, log_path=log_path)


def family(process: EngineProcess) -> list[psutil.Process]:
    leader = psutil.Process(process.child.pid)
    return [leader, *leader.children(recursive=True)]


def is_gone(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize("program", [HEALTHY, STUBBORN], ids=["on SIGTERM", "although it ignores SIGTERM"])
async def test_an_engine_is_usable_once_it_is_healthy_and_ends_with_its_helpers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str
) -> None:
    monkeypatch.setattr("astraflow_raas.engine.process._TERM_GRACE_S", 20.0 if program is HEALTHY else 0.2)
    process = await started(program, tmp_path)
    await process.wait_healthy(timeout_s=20.0)
    members = family(process)
    assert len(members) == 3, "it, its helper, and the one that ends them"
    await process.end()
    assert not process.alive
    await eventually(lambda: all(map(is_gone, members)), what="all have ended")
    await process.end()


async def test_an_engine_whose_processes_all_stand_still_is_ended_with_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("astraflow_raas.engine.process._TERM_GRACE_S", 0.2)
    process = await started(HEALTHY, tmp_path)
    await process.wait_healthy(timeout_s=20.0)
    members = family(process)
    for member in members:
        member.suspend()
    await process.end()
    assert not process.alive
    await eventually(lambda: all(map(is_gone, members)), what="all have ended")


async def test_an_engine_that_dies_is_quoted_with_the_end_of_its_log(tmp_path: Path) -> None:
    process = await started(DIES, tmp_path)
    with pytest.raises(EngineUnavailable, match="no such model"):
        await process.wait_healthy(timeout_s=20.0)
    await process.end()


REFUSES = """
import json, sys
print("reading the model")
print(json.dumps({"event": "daemon.failed", "reason": sys.argv[2], "message": "no Gemma; --engine sglang"}))
sys.exit(2)
"""


@pytest.mark.parametrize(
    ("reason", "error"), [("INVALID_MODEL", EngineUnsuitable), ("ADDRESS_IN_USE", EngineUnavailable)]
)
async def test_only_a_refused_model_is_not_worth_another_try(
    tmp_path: Path, reason: str, error: type[Exception]
) -> None:
    process = await started(REFUSES, tmp_path, reason)
    with pytest.raises(error, match="no Gemma; --engine sglang"):
        await process.wait_healthy(timeout_s=20.0)
    await process.end()


async def test_an_engine_that_is_never_healthy_is_given_up(tmp_path: Path) -> None:
    process = await started("import time; time.sleep(600)", tmp_path)
    with pytest.raises(EngineUnavailable, match=r"not healthy within 0\.3 s"):
        await process.wait_healthy(timeout_s=0.3)
    await process.end()
    assert not process.alive
