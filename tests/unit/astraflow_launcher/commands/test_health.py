"""`astraflow health`: whom it asks, and what its answer is for an orchestrator."""

import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from support.cli import run

ANSWERS = {
    "/healthz": (200, "ok"),
    "/startedz": (503, "starting\n"),
    "/readyz": (
        503,
        json.dumps({"ready": False, "checks": [{"name": "redis", "ready": False, "reason": "no answer"}]}),
    ),
}


class Pages(BaseHTTPRequestHandler):
    """A daemon that lives and is not ready."""

    def do_GET(self) -> None:
        status, body = ANSWERS[self.path]
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *_: object) -> None:
        """Quiet."""


@pytest.fixture
def port() -> Iterator[int]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Pages) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_address[1]
        server.shutdown()


@pytest.fixture
def address_file(tmp_path: Path, port: int) -> Path:
    path = tmp_path / "dataflow.json"
    path.write_text(json.dumps({"grpc": "0.0.0.0:1", "http": f"0.0.0.0:{port}", "pid": 1}))
    return path


@pytest.mark.parametrize(
    ("question", "status", "says"),
    [
        ((), 0, "dataflow healthz: ok"),
        (("--started",), 1, "dataflow startedz: starting"),
        (("--ready",), 1, "dataflow readyz: redis: no answer"),
    ],
)
def test_the_status_is_the_answer_and_the_reason_is_said(
    address_file: Path, question: tuple[str, ...], status: int, says: str
) -> None:
    asked = run("health", "dataflow", "--address-file", f"{address_file}", *question)
    assert (asked.status, asked.output.strip()) == (status, says)


def test_the_daemons_own_variables_say_where_it_is(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASTRAFLOW_HTTP_PORT", f"{port}")
    assert run("health", "raas").status == 0


def test_a_probe_port_is_asked_before_the_pages(tmp_path: Path, port: int) -> None:
    path = tmp_path / "raas.json"
    path.write_text(json.dumps({"http": "127.0.0.1:1", "probe": f"127.0.0.1:{port}", "pid": 1}))
    assert run("health", "raas", "--address-file", f"{path}", "--json").json == {
        "daemon": "raas",
        "question": "healthz",
        "address": f"127.0.0.1:{port}",
        "ok": True,
        "reason": "",
    }


def test_a_daemon_that_is_not_there_is_sick_with_the_reason(tmp_path: Path) -> None:
    early = run("health", "raas", "--address-file", f"{tmp_path / 'none.json'}")
    assert (early.status, "has not started" in early.output) == (1, True)
    gone = run("health", "raas", "--port", "1")
    assert (gone.status, "no answer at 127.0.0.1:1" in gone.output) == (1, True)


@pytest.mark.parametrize("words", [("raas",), ("raas", "--port", "1", "--ready", "--started"), ("redis",)])
def test_a_question_that_cannot_be_asked_ends_with_status_2(words: tuple[str, ...]) -> None:
    assert run("health", *words).status == 2
