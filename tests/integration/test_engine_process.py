"""The engine as a process: how it starts, stops, refuses and dies."""

import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest

from astraflow_kit.failpoints import read_hits
from support.engine_process import engine_command, running_engine
from support.tiny_models import TinyShape, save_tiny_model

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]

DEADLINE_S = 60.0
# Measured near 250 MiB, most of it torch itself; room for other versions of torch.
MAX_RESIDENT_BYTES = 600 * 2**20


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("engine") / "model", shape=TinyShape(max_positions=4_096))


def generate(url: str, *, max_new_tokens: int) -> httpx.Response:
    params = {"max_new_tokens": max_new_tokens, "ignore_eos": True}
    body = {"input_ids": [5, 6, 7], "sampling_params": params}
    with httpx.Client(trust_env=False, timeout=DEADLINE_S) as client:
        return client.post(f"{url}/generate", json=body)


def run_to_end(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(arguments, capture_output=True, text=True, timeout=DEADLINE_S, check=False)


def test_a_check_reads_the_whole_checkpoint_and_exits(model: Path) -> None:
    finished = run_to_end(*engine_command(model, "--check"))
    assert finished.returncode == 0, finished.stderr
    assert "context_length: " in finished.stdout


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--context-length", "5000"], "context_length is 5000"),
        (["--max-running-requests", "0"], "option max_running_requests = 0"),
        (["--max-running-request", "4"], "No such option"),
    ],
)
def test_wrong_options_end_the_process_with_a_reason(model: Path, options: list[str], complaint: str) -> None:
    finished = run_to_end(*engine_command(model, "--check", *options))
    assert finished.returncode == 2
    assert complaint in finished.stderr
    assert "Traceback" not in finished.stderr


def test_a_model_that_cannot_be_served_ends_the_process_before_it_listens(tmp_path: Path) -> None:
    finished = run_to_end(*engine_command(tmp_path / "nowhere"))
    assert finished.returncode == 2
    assert "config.json cannot be read" in finished.stderr
    assert "engine.serving" not in finished.stderr


def test_sigterm_ends_a_busy_engine_cleanly(model: Path, tmp_path: Path) -> None:
    with running_engine(model, folder=tmp_path) as engine, ThreadPoolExecutor(1) as pool:
        busy = pool.submit(generate, engine.url, max_new_tokens=4_000)
        with httpx.Client(trust_env=False, timeout=DEADLINE_S) as client:
            while not client.get(f"{engine.url}/server_info").json()["internal_states"][0]["num_running"]:
                assert not busy.done()
        engine.process.send_signal(signal.SIGTERM)
        assert engine.process.wait(DEADLINE_S) == 0
        assert busy.result(DEADLINE_S).status_code == 503
        assert "Traceback" not in engine.log.read_text()


def test_a_failing_pass_ends_the_process_with_an_error(model: Path, tmp_path: Path) -> None:
    hits = tmp_path / "hits"
    environment = {
        "PATH": "/usr/bin:/bin",
        "ASTRAFLOW_FAILPOINTS": "engine.decode_step=raise@5",
        "ASTRAFLOW_FAILPOINTS_LOG": str(hits),
        "OMP_NUM_THREADS": "1",
    }
    with running_engine(model, folder=tmp_path, environment=environment) as engine:
        assert generate(engine.url, max_new_tokens=20).status_code == 503
        assert engine.process.wait(DEADLINE_S) == 1
    assert [hit.number for hit in read_hits(hits) if hit.acted] == [5]


def test_the_process_stays_small(model: Path, tmp_path: Path) -> None:
    with running_engine(model, folder=tmp_path) as engine:
        assert generate(engine.url, max_new_tokens=50).status_code == 200
        assert psutil.Process(engine.process.pid).memory_info().rss < MAX_RESIDENT_BYTES
