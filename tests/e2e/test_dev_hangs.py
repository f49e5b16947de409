"""Processes of a run that stand still: for a while, which costs time and starts nothing again, or for good, which is
noticed and mended. Nothing is lost or trained on twice.

CI has a server that stands still for 15 s and a node that does so for good among the gray failures of tests/chaos, in
one run with others. Here nobody replaces what stands still for a while, and every kind of process does so for good.
"""

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from support.audit import audit
from support.chaos import Monkey, Story
from support.development import RunFiles, dev, finish, wait_for
from support.ledger_audit import audit as audit_ledgers

pytestmark = [pytest.mark.e2e, pytest.mark.soak, pytest.mark.timeout(900)]

STEPS = 12
TRAINER, RANK = "trainer-solver", "trainer-solver-rank-1"


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """It stands still during the block, or until somebody kills it."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def pid_of(files: RunFiles, name: str) -> int | None:
    """The newest process of a child, as the launcher calls it, or the living engine."""
    if name == "engine":
        return Monkey(Story(files=files)).pid_of(name)
    return dict(files.starts())[name]


def require_pid(files: RunFiles, name: str) -> int:
    wait_for(lambda: pid_of(files, name), what=f"a living {name}")
    pid = pid_of(files, name)
    assert pid is not None
    return pid


def require_whole(files: RunFiles) -> int:
    """All steps are trained and nothing is lost or doubled; how many were taken again."""
    assert audit(files.folder).violations == []
    ledger = audit_ledgers(files.data_dir / "work" / "trainer-solver" / "ledger.jsonl")
    assert ledger.last_step == STEPS
    return ledger.num_replayed


@pytest.mark.parametrize(
    ("victim", "stopped_s"),
    [
        ("dataflow", 60),
        ("redis", 60),
        *((role, seconds) for role in (TRAINER, "node-1", "engine") for seconds in (30, 180)),
    ],
)
def test_the_others_outlive_one_that_stands_still_for_a_while(
    tmp_path: Path, victim: str, stopped_s: int
) -> None:
    files = RunFiles(tmp_path)
    with dev(tmp_path, "--steps", str(STEPS), "--max-silence-s", "0") as launcher:
        wait_for(lambda: files.steps_done() >= 2, timeout_s=180)
        started = files.starts()
        with stopped(require_pid(files, victim)):
            time.sleep(stopped_s)
        summary = finish(launcher, tmp_path)
    assert files.starts() == started, "an engine is its node's to replace"
    assert (summary["steps"], summary["conservation_error"]) == (STEPS, 0)
    assert require_whole(files) == 0


@pytest.mark.parametrize(
    ("victim", "variables", "arguments"),
    [
        ("node-1", {}, ()),
        ("engine", {"ASTRAFLOW_ENGINE_STALL_S": "5"}, ()),
        (TRAINER, {}, ()),
        (RANK, {"ASTRAFLOW_RANK_SILENCE_S": "5"}, ("--trainer-ranks", "2")),
    ],
)
def test_one_that_stands_still_for_good_is_replaced(
    tmp_path: Path, victim: str, variables: dict[str, str], arguments: tuple[str, ...]
) -> None:
    files, options = RunFiles(tmp_path), ("--steps", str(STEPS), "--max-silence-s", "6", *arguments)
    with dev(tmp_path, *options, variables=variables) as launcher:
        wait_for(lambda: files.steps_done() >= 2, timeout_s=240)
        first = require_pid(files, victim)
        os.kill(first, signal.SIGSTOP)
        wait_for(lambda: pid_of(files, victim) not in (None, first), what="another one", timeout_s=120)
        summary = finish(launcher, tmp_path)
    assert (summary["steps"], summary["conservation_error"]) == (STEPS, 0)
    require_whole(files)
