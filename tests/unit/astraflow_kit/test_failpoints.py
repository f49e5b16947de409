"""Failpoints act in real processes, and only after their hit is in the log."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from astraflow_kit import failpoints
from astraflow_kit.failpoints import FailpointRaised, FailpointSpecError, Hit

KNOWN = {"a.before": "one", "a.after": "two"}
_CHILD = """
import sys
from pathlib import Path
from astraflow_kit import failpoints
spec, log, hits = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
failpoints.arm(spec, seed=7, log_path=log, known={"a.before": "", "a.after": ""})
for _ in range(hits):
    failpoints.hit("a.before")
"""


@pytest.fixture(autouse=True)
def _disarm() -> object:
    yield
    failpoints.arm("")


def _child(spec: str, log: Path, *, hits: int = 3) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", _CHILD, spec, str(log), str(hits)])


def test_nothing_armed_does_nothing() -> None:
    failpoints.arm("", known=KNOWN)
    failpoints.hit("a.before")


@pytest.mark.parametrize(
    ("spec", "exit_status", "hits"),
    [
        ("a.before=kill", -signal.SIGKILL, 1),
        ("a.before=kill@3", -signal.SIGKILL, 3),
        ("a.before=exit:17@2", 17, 2),
        ("a.before=raise", 1, 1),
        ("a.before=kill@9", 0, 3),
        ("a.after=kill", 0, 0),
    ],
)
def test_a_process_ends_as_armed_and_logs_it(tmp_path: Path, spec: str, exit_status: int, hits: int) -> None:
    log = tmp_path / "hits"
    assert _child(spec, log).wait() == exit_status
    recorded = failpoints.read_hits(log)
    assert [hit.number for hit in recorded] == list(range(1, hits + 1))
    if hits:
        assert recorded[-1].acted is (exit_status != 0)


def test_nth_counts_across_restarts_so_the_restarted_process_survives(tmp_path: Path) -> None:
    log = tmp_path / "hits"
    assert _child("a.before=kill@2", log).wait() == -signal.SIGKILL
    assert _child("a.before=kill@2", log).wait() == 0
    assert [hit.acted for hit in failpoints.read_hits(log)] == [False, True, False, False, False]


def test_stop_suspends_the_process_until_continued(tmp_path: Path) -> None:
    child = _child("a.before=stop@1", tmp_path / "hits")
    _, status = os.waitpid(child.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status)
    os.kill(child.pid, signal.SIGCONT)
    assert child.wait() == 0


def test_sleep_blocks_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    failpoints.arm("a.after=sleep:0.25", known=KNOWN)
    failpoints.hit("a.after")
    assert slept == [0.25]


def test_raise_names_the_failpoint() -> None:
    failpoints.arm("a.after=raise", known=KNOWN)
    with pytest.raises(FailpointRaised, match=r"a\.after"):
        failpoints.hit("a.after")


def _drawn(seed: int, log: Path) -> list[bool]:
    failpoints.arm("a.after=sleep:0%0.3", seed=seed, log_path=log, known=KNOWN)
    for _ in range(300):
        failpoints.hit("a.after")
    return [hit.acted for hit in failpoints.read_hits(log)]


def test_probability_is_drawn_from_the_seed(tmp_path: Path) -> None:
    first, again, other = (_drawn(seed, tmp_path / name) for seed, name in ((1, "a"), (1, "b"), (2, "c")))
    assert first == again != other
    assert 50 < sum(first) < 130


def _hit_often() -> None:
    for _ in range(50):
        failpoints.hit("a.after")


def test_hits_from_threads_are_numbered_without_gaps(tmp_path: Path) -> None:
    log = tmp_path / "hits"
    failpoints.arm("a.after=sleep:0", log_path=log, known=KNOWN)
    threads = [threading.Thread(target=_hit_often) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    hits = failpoints.read_hits(log)
    assert [hit.number for hit in hits] == list(range(1, 201))
    assert hits[0] == Hit(name="a.after", number=1, action="sleep", acted=True, pid=os.getpid())


@pytest.mark.parametrize(
    ("spec", "complaint"),
    [
        ("a.befor=kill", "Did you mean 'a.before'"),
        ("zzz=kill", "Known: a.after, a.before"),
        ("a.before", "is not name=action"),
        ("a.before=explode", "actions: kill, stop"),
        ("a.before=sleep", "is not name=action"),
        ("a.before=kill:3", "is not name=action"),
        ("a.before=sleep:1.2.3", "is not name=action"),
        ("a.before=kill@0", "counts from 1"),
        ("a.before=kill%25", "at most 1"),
        ("a.before=kill;a.before=stop", "given twice"),
    ],
)
def test_a_wrong_spec_is_refused_with_the_remedy(spec: str, complaint: str) -> None:
    with pytest.raises(FailpointSpecError, match=complaint):
        failpoints.parse(spec, known=KNOWN)


def test_a_line_that_is_still_being_written_is_no_hit_yet(tmp_path: Path) -> None:
    log_path = tmp_path / "hits"
    failpoints.arm("a.after=sleep:0", log_path=log_path, known=KNOWN)
    failpoints.hit("a.after")
    (whole,) = failpoints.read_hits(log_path)
    log_path.write_text(log_path.read_text() + log_path.read_text()[:40])
    assert failpoints.read_hits(log_path) == [whole]
