"""The stages of a node's start, measured from the start of its process."""

import subprocess
import sys
from pathlib import Path

import pytest

from astraflow_kit.metrics import Metrics
from astraflow_raas.timeline import Stage, Timeline, process_age_s
from support.manual_clock import ManualClock


def passed(*stages: Stage, metrics: Metrics | None = None) -> Timeline:
    """A timeline with a second before each stage."""
    clock = ManualClock()
    timeline = Timeline(metrics=metrics, age_s=0.5, clock=clock)
    for stage in stages:
        clock.now_s += 1.0
        timeline.mark(stage)
    return timeline


def test_stages_count_from_the_start_of_the_process() -> None:
    metrics = Metrics()
    timeline = passed(*Stage, metrics=metrics)
    assert list(timeline.reached_s.values()) == [1.5, 2.5, 3.5, 4.5, 5.5, 6.5, 7.5]
    assert timeline.engine_start_s == 1.0
    assert b'astraflow_raas_start_seconds{stage="first_lease"} 7.5' in metrics.render()


def test_the_last_policy_counts_and_nothing_after_the_first_lease() -> None:
    timeline = passed(Stage.WEIGHTS, Stage.WEIGHTS, Stage.FIRST_LEASE, Stage.WEIGHTS)
    assert timeline.reached_s == {Stage.WEIGHTS: 2.5, Stage.FIRST_LEASE: 3.5}


def test_an_engine_that_ran_already_costs_no_start() -> None:
    assert passed(Stage.ENGINE_READY, Stage.FIRST_LEASE).engine_start_s == 0.0


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="the kernel does not say")
def test_a_process_knows_its_age() -> None:
    code = "import time; t = time.monotonic(); from astraflow_raas.timeline import process_age_s as age; \
time.sleep(0.3); a = age(); print(a - (time.monotonic() - t))"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 0.0 <= float(process.stdout) < 30.0, "the interpreter's own start counts, and nothing else"


def test_an_unknown_age_is_none(tmp_path: Path) -> None:
    assert process_age_s(tmp_path / "stat") == 0.0
