"""A server or a Redis that stands still for a while costs a run time: nothing of it is started again, and nothing is
lost or trained on twice.
"""

import signal
import time
from pathlib import Path

import pytest

from support.audit import audit
from support.development import RunFiles, dev, finish, wait_for
from support.ledger_audit import audit as audit_ledgers

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

STEPS = 12


@pytest.mark.parametrize(
    ("victim", "stopped_s"),
    [
        pytest.param("dataflow", 18, marks=pytest.mark.ci),
        pytest.param("dataflow", 60, marks=pytest.mark.soak),
        pytest.param("redis", 60, marks=pytest.mark.soak),
    ],
)
def test_trainer_and_node_outlive_a_server_or_redis_that_stands_still(
    tmp_path: Path, victim: str, stopped_s: int
) -> None:
    files = RunFiles(tmp_path)
    with dev(tmp_path, "--steps", str(STEPS), "--max-silence-s", "0") as launcher:
        wait_for(lambda: files.steps_done() >= 2, timeout_s=180)
        started = files.starts()
        (process,) = (process for process in files.processes() if process.pid == dict(started)[victim])
        process.send_signal(signal.SIGSTOP)
        time.sleep(stopped_s)
        process.send_signal(signal.SIGCONT)
        summary = finish(launcher, tmp_path)
    assert files.starts() == started
    assert (summary["steps"], summary["conservation_error"]) == (STEPS, 0)
    assert audit(tmp_path).violations == []
    ledger = audit_ledgers(files.data_dir / "work" / "trainer-solver" / "ledger.jsonl")
    assert (ledger.last_step, ledger.num_replayed) == (STEPS, 0)
