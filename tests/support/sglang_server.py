"""Real SGLang on a CPU, from the environment that `make sglang-env` builds; `sglang_cpu/` says what stands in there.

Start-up takes half a minute on an idle machine, so tests share a server per file. Skipped where there is no such
environment: it holds 3.4 GB.
"""

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from astraflow_kit.ports import LOOPBACK, free_port
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

needs_sglang = pytest.mark.skipif(
    not SGLANG_PYTHON.exists(), reason="there is no SGLang here; `make sglang-env` installs it"
)


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
