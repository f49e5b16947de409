"""A finished run is continued by the same command with more steps."""

from collections import Counter
from pathlib import Path

import pytest

from support.audit import audit
from support.development import RunFiles, dev, finish

# In ci test_dev_rollback.py goes on with a finished run, too.
pytestmark = [pytest.mark.e2e, pytest.mark.soak, pytest.mark.timeout(240)]


def test_a_finished_run_trains_on_when_more_steps_are_asked_for(tmp_path: Path) -> None:
    for steps in ("3", "5"):
        with dev(tmp_path, "--steps", steps) as launcher:
            summary = finish(launcher, tmp_path)
        assert summary["steps"] == int(steps)
        assert summary["heldout_n"] == 8
    assert audit(tmp_path).violations == []
    steps, versions, evaluations = map(RunFiles(tmp_path).read_metrics, ("step", "version", "evaluation"))
    assert [line["step"] for line in steps] == [1, 2, 3, 4, 5]
    assert max(Counter(line["version"] for line in versions).values()) == 1
    assert [line["version"] for line in evaluations if line["final"]] == [3, 5]
    assert summary["reward_first"] == pytest.approx(steps[0]["reward_mean"])  # not that of step 4
