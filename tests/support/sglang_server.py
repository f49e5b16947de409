"""Real SGLang on a CPU, from the environment that `make sglang-env` builds; `sglang_cpu/` says what stands in there.

Start-up takes half a minute on an idle machine, so tests share a server per file. Skipped where there is no such
environment: it holds 3.4 GB.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from astraflow_kit.ports import LOOPBACK, free_port
from astraflow_raas.engine.command import EngineCommand
from astraflow_raas.engine.http import HttpEngine
from astraflow_raas.engine.process import EngineProcess as NodesEngine
from astraflow_raas.engine.process import start_engine
from support.engine_process import EngineProcess

SGLANG_PYTHON = Path(__file__).parents[2] / ".venv-sglang" / "bin" / "python"
START_DEADLINE_S = 300.0

CPU_ENVIRONMENT = {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
# fp32, so that log-probs can be compared as sharply as those of our own engine.
CPU_OPTIONS = (
    "--device=cpu",
    "--dtype=float32",
    "--attention-backend=torch_native",
    "--disable-cuda-graph",
    "--grammar-backend=none",
    "--max-total-tokens=40000",
    "--sleep-on-idle",
)

PLACES = 16
"""Calls that it runs at once for the tests of swaps."""

needs_sglang = pytest.mark.skipif(
    not SGLANG_PYTHON.exists(), reason="there is no SGLang here; `make sglang-env` installs it"
)


@contextmanager
def on_a_cpu() -> Iterator[None]:
    """What the node's own environment must say."""
    with pytest.MonkeyPatch.context() as patched:
        for name, value in CPU_ENVIRONMENT.items():
            patched.setenv(name, value)
        yield


@pytest.fixture
def on_cpu() -> Iterator[None]:
    """The same for a test."""
    with on_a_cpu():
        yield


@contextmanager
def running_sglang(model: Path, *options: str, folder: Path) -> Iterator[EngineProcess]:
    """A server of `model` on a free loopback port; its whole process group is killed at the end."""
    port, log = free_port(), folder / "sglang.log"
    command = [str(SGLANG_PYTHON), "-m", "sglang.launch_server", "--model-path", str(model)]
    command += ["--host", LOOPBACK, "--port", str(port), "--skip-tokenizer-init", "--skip-server-warmup"]
    command += ["--disable-overlap-schedule", *CPU_OPTIONS, *options]
    environment = {**os.environ, **CPU_ENVIRONMENT}
    environment.pop("PYTHONPATH", None)
    with (
        log.open("wb") as output,
        subprocess.Popen(
            command, stdout=output, stderr=output, env=environment, start_new_session=True
        ) as process,
    ):
        try:
            engine = EngineProcess(f"http://{LOOPBACK}:{port}", process, log)
            _wait_healthy(engine)
            yield engine
        finally:
            os.killpg(process.pid, signal.SIGKILL)


def _wait_healthy(engine: EngineProcess) -> None:
    give_up_s = time.monotonic() + START_DEADLINE_S
    with httpx.Client(trust_env=False, timeout=30.0) as client:
        while time.monotonic() < give_up_s:
            if engine.process.poll() is not None:
                raise RuntimeError(f"SGLang ended before it listened:\n{engine.log.read_text()[-4000:]}")
            try:
                if client.get(f"{engine.url}/health_generate").status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.5)
    raise RuntimeError(f"SGLang was not healthy in {START_DEADLINE_S} s:\n{engine.log.read_text()[-4000:]}")


def engine_command(*options: str, **settings: Any) -> EngineCommand:
    """As a node would start it."""
    return EngineCommand(
        **settings,
        kind="sglang",
        python=SGLANG_PYTHON,
        extra_args=(*CPU_OPTIONS, f"--max-running-requests={PLACES + 1}", *options),
        max_running_requests=PLACES,
        num_threads=1,
        seed=0,
    )


async def started_sglang(folder: Path, model: Path, *options: str, **settings: Any) -> NodesEngine:
    """One that a node started; it is not healthy yet. `settings` are those of EngineCommand."""
    log_path = folder / "engine.log"
    orders = settings.get("orders")
    return await start_engine(
        engine_command(*options, **settings),
        model_dir=model,
        version=0,
        log_path=log_path,
        connect=partial(HttpEngine, orders=orders),
    )


def report(**figures: object) -> None:
    """For docs/results/sglang.md: pytest -s shows it."""
    sys.stdout.write(json.dumps(figures, indent=1) + "\n")
