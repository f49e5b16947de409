"""Supervised fine-tuning through the services of a run: nodes push what tasks show, and the trainer learns it."""

from itertools import chain
from pathlib import Path
from statistics import fmean

import pytest

from support.development import RunFiles, dev, finish

STEPS = 60
SETTINGS = (
    "run.dataset=told_numbers:ToldNumbers",
    "raas.workflow=astraflow_raas.workflows.demonstrated:Demonstrated",
    "raas.reward=told_numbers:SaidIt",
    "trainer.algorithm={preset: sft}",
    "trainer.optimizer={learning_rate: 0.003, warmup_steps: 5, beta2: 0.999, eps: 1.0e-8}",
    "policies.solver.model.warm_start={demonstrations: told_numbers:guesses, steps: 5, batch_size: 32}",
    f"run.steps={STEPS}",
    "dataflow.group_size=1",
    "dataflow.groups_per_step=32",
    "dataflow.evaluation={every_versions: 60, num_samples: 50, final_samples: 200}",
)

pytestmark = [pytest.mark.e2e, pytest.mark.ci, pytest.mark.timeout(600)]


def test_what_tasks_show_is_learned_and_held_out_tasks_are_answered(tmp_path: Path) -> None:
    with dev(tmp_path, *chain.from_iterable(("--set", setting) for setting in SETTINGS)) as launcher:
        summary = finish(launcher, tmp_path, timeout_s=560)
    losses = [step["loss"] for step in RunFiles(tmp_path).read_metrics("step")]
    assert fmean(losses[-5:]) < 0.3 * fmean(losses[:5])
    # A guess in the right form is right once in ten times.
    assert summary["heldout_first"] < 0.2
    assert summary["heldout_last"] > 0.5
    assert (summary["steps"], summary["reward_last"], summary["steps_skipped"]) == (STEPS, 1.0, 0)
    assert summary["trajectories"]["conservation_error"] == 0
