"""A run that goes on for long does not grow: memory of its processes, logs, journals and Redis' files.

`make soak T=tests/e2e/test_dev_growth.py` takes ASTRAFLOW_GROWTH_STEPS (5,000) steps, half an hour or less, and writes
docs/results/growth.md; in ci 100 steps must not prove that anything grows.
"""

import os
import platform
import signal
import subprocess
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

import pytest

from support.development import ROOT, RunFiles, dev, finish, wait_for
from support.growth import Growth, fitted, watch

pytestmark = [pytest.mark.e2e]

KIB, MIB = 2**10, 2**20
LOG_BYTES = MIB // 32
TINIEST = (
    *("--set", "dataflow.groups_per_step=1"),
    *("--set", "dataflow.group_size=2"),
    *("--set", "policies.solver.sampling.max_new_tokens=8"),
    *("--set", "trainer.checkpoint_every_steps=20"),
    # The grace of 15 minutes would hold more versions than the run has.
    *("--set", "trainer.publish.collect_after_s=5"),
    *("--max-log-mib", str(LOG_BYTES / MIB)),
)
STEPS = int(os.environ.get("ASTRAFLOW_GROWTH_STEPS", "5000"))
PROCESSES = ("launcher", "dataflow", "valkey", "node", "engine", "trainer")
# What is known to stay: 1 KiB for each version in each of a trainer's three readers of its log, tombstones of tasks in
# Redis for a day. With this 10,000 steps take 80 MiB in a process.
FLAT_BYTES = 8 * KIB
# What is kept for ever, or bounded far above what 5,000 steps write: bytes a step.
KEPT = {"metrics.jsonl": 3 * KIB, "ledger and journal": 3 * KIB, "store log": 4 * KIB}
COLLECTED = "store without its log"
COLLECTED_BYTES = 8 * KIB
LONG = {f"RSS {name}": FLAT_BYTES for name in PROCESSES} | KEPT | {COLLECTED: COLLECTED_BYTES}
# In so few steps caches still fill; measured: engine 130 KiB a step, trainer 150 from a saw-tooth's low, others 10.
# The store is not judged: how far its collection has come in so many steps is a matter of time.
SHORT = dict.fromkeys((*(f"RSS {name}" for name in PROCESSES), *KEPT), 16 * KIB)
SHORT |= {"RSS engine": 320 * KIB, "RSS trainer": 320 * KIB}
REDIS = "Redis' files"
# It is written anew at 8 MB or when it has doubled; while it is, the old one is there too.
REDIS_PEAK_BYTES = 40 * MIB
# The log and three older ones, and what is written between two looks.
LOG_PEAK_BYTES = 4 * (LOG_BYTES + 128 * KIB)

ABOUT = """# Does a long run grow?

Written by `make soak T=tests/e2e/test_dev_growth.py`: the quickstart's loop at its tiniest (one group of two answers a
step), sampled four times a second. A slope is fitted through the means of twelve equal blocks of the samples after the
warm-up; its interval holds with 95 % confidence (Student's t). The upper bound of a process must be at most 8 KiB a
step, of which the record of each version, in each reader of the log, takes 1. Logs are rotated at 32 KiB here, so that
the bound is reached.
"""


def _grown(folder: Path, *, steps: int) -> Growth:
    """Sizes of a run of so many steps, which ends in order."""
    files = RunFiles(folder)
    with dev(folder, "--steps", "1000000", *TINIEST) as launcher:

        def alive() -> None:
            assert launcher.poll() is None, files.stderr.read_text()[-4000:]

        wait_for(lambda: launcher.poll() is not None or files.steps_taken() >= 1)
        growth = watch(files, launcher_pid=launcher.pid, steps=steps, alive=alive)
        launcher.send_signal(signal.SIGINT)
        finish(launcher, folder)
    return growth


def _wrong(growth: Growth, *, warm_up: int, limits: Mapping[str, float], proved: bool) -> list[str]:
    """What grows more than it may: with `proved` everything is to be shown flat, else only what surely grows counts."""
    wrong = []
    for name, most in limits.items():
        slope = growth.slope(name, after_step=warm_up)
        if (slope.at_most if proved else slope.at_least) > most:
            wrong.append(f"{name}: {slope.mean:.0f} ± {slope.margin:.0f} bytes a step, at most {most:.0f}")
    peaks = {name: LOG_PEAK_BYTES for name in growth.sizes if name.startswith("logs of ")}
    for name, most in (peaks | {REDIS: REDIS_PEAK_BYTES}).items():
        if growth.peak(name) > most:
            wrong.append(f"{name}: {growth.peak(name):.0f} bytes, at most {most:.0f}")
    return wrong


@pytest.mark.ci
@pytest.mark.timeout(300)
def test_a_hundred_steps_do_not_show_that_anything_grows(tmp_path: Path) -> None:
    growth = _grown(tmp_path, steps=100)
    assert _wrong(growth, warm_up=30, limits=SHORT, proved=False) == []
    assert list((tmp_path / "run" / "logs").glob("*.1.log")), "no log was rotated"


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_thousands_of_steps_are_flat(tmp_path: Path) -> None:
    growth, warm_up = _grown(tmp_path, steps=STEPS), STEPS * 3 // 10
    (ROOT / "docs" / "results" / "growth.md").write_text(_page(growth, warm_up=warm_up))
    assert _wrong(growth, warm_up=warm_up, limits=LONG, proved=True) == []


def test_growth_that_a_saw_tooth_hides_is_seen_and_noise_is_not_growth() -> None:
    steps = range(300)
    saw_tooth = [4000.0 * (step % 17) for step in steps]
    flat = fitted(steps, saw_tooth)
    assert -100 < flat.at_least < 0 < flat.at_most < 100
    grown = fitted(steps, [1000.0 * step + tooth for step, tooth in zip(steps, saw_tooth, strict=True)])
    assert 900 < grown.at_least < 1000 < grown.at_most < 1100
    with pytest.raises(ValueError, match="24 make a slope"):
        fitted([1.0] * 5, [1.0] * 5)


def _page(growth: Growth, *, warm_up: int) -> str:
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
    ).stdout.strip()
    rows = ["| what | bytes a step | 95 % interval | peak, KiB |", "|---|---:|---:|---:|"]
    for name in sorted(growth.sizes):
        slope = growth.slope(name, after_step=warm_up)
        interval = f"{slope.at_least:.0f} to {slope.at_most:.0f}"
        rows.append(f"| {name} | {slope.mean:.0f} | {interval} | {growth.peak(name) / KIB:.0f} |")
    facts = [
        f"machine: {platform.machine()}, Python {platform.python_version()}",
        f"date: {datetime.now(tz=UTC):%Y-%m-%d}, commit {commit}",
        f"steps: {growth.steps[-1]}, the first {warm_up} are the warm-up; samples: {len(growth.steps)}",
    ]
    return "\n".join([ABOUT, *(f"* {fact}" for fact in facts), "", *rows, ""])
