"""Two roles of one policy: a planner and a worker train one trainer's policy, each in groups of its own."""

import json
import signal
from pathlib import Path

import pytest

from support.development import RunFiles, dev, finish, wait_for
from support.ledger_audit import audit

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

STEPS = 4
WORKFLOW = {
    "use": "astraflow_raas.workflows.planner_worker:PlannerWorker",
    "with": {"planner_prompt": "{problem} Plan.", "worker_prompt": "{problem} {plan}", "answers": 2},
}


def test_both_roles_of_one_policy_are_trained(tmp_path: Path) -> None:
    roles = ("--set", "roles.planner=solver", "--set", "roles.worker=solver")
    files = RunFiles(tmp_path)
    with dev(
        tmp_path, "--steps", "1000", *roles, "--set", f"raas.workflow={json.dumps(WORKFLOW)}"
    ) as launcher:
        wait_for(lambda: files.steps_taken() >= STEPS)
        launcher.send_signal(signal.SIGINT)
        summary = finish(launcher, tmp_path)
    assert summary["conservation_error"] == 0
    trained = audit(files.data_dir / "work" / "trainer-solver" / "ledger.jsonl").trained_ids
    # An episode's trajectories are numbered: its plan, then its two answers.
    numbers = [identifier.rpartition("-")[2] for identifier in trained]
    assert 0 < numbers.count("0") < numbers.count("1") + numbers.count("2")
