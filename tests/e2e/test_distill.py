"""The recipe of distillation through all daemons: its teacher is made, and each step is the teacher's."""

from itertools import chain
from pathlib import Path

import pytest

from support.development import ROOT, RunFiles, dev, finish

pytestmark = [pytest.mark.e2e, pytest.mark.ci, pytest.mark.timeout(300)]

TINY = (
    "policies.solver.model.tokenizer={vocab_size: 300, num_texts: 50}",
    "trainer.algorithm.kl.reference.warm_start.steps=4",
    "trainer.algorithm.kl.reference.architecture.num_hidden_layers=1",
)


def test_a_student_takes_steps_by_what_a_teacher_thinks_of_its_tokens(tmp_path: Path) -> None:
    settings = chain.from_iterable(("--set", setting) for setting in TINY)
    small = ROOT / "recipes" / "distill" / "small.yaml"
    with dev(tmp_path, "--steps", "3", *settings, recipe=small) as launcher:
        summary = finish(launcher, tmp_path)
    assert (summary["steps"], summary["steps_skipped"], summary["conservation_error"]) == (3, 0, 0)
    assert summary["density_mean"] > 0
    assert len(list((RunFiles(tmp_path).data_dir / "cache").glob("initial-*"))) == 2
