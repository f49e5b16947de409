"""`astraflow dev --engine sglang` with the real engine, on a CPU."""

import json
from pathlib import Path

import pytest

from support.development import dev, finish
from support.sglang_server import CPU_ENVIRONMENT, CPU_OPTIONS, SGLANG_PYTHON, needs_sglang

pytestmark = [pytest.mark.e2e, pytest.mark.ci, needs_sglang, pytest.mark.timeout(560)]


def test_a_run_on_sglang_needs_two_options(tmp_path: Path) -> None:
    variables = {**CPU_ENVIRONMENT, "ASTRAFLOW_ENGINE_ARGS": json.dumps(CPU_OPTIONS)}
    options = ("--engine", "sglang", "--engine-python", str(SGLANG_PYTHON), "--steps", "1")
    with dev(tmp_path, *options, variables=variables) as launcher:
        summary = finish(launcher, tmp_path, timeout_s=500)
    assert (summary["steps"], summary["conservation_error"], summary["heldout_n"]) == (1, 0, 8)
    assert summary["nodes"]["node-1"]["tokens"] > 0
