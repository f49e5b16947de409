"""Settings of the data path that contradict each other are refused with the remedy."""

import pytest
from pydantic import ValidationError

from astraflow.recipe.dataflow import ArchiveSettings


def test_log_probs_of_trainers_need_samples_that_were_trained_on() -> None:
    with pytest.raises(ValidationError, match=r"keep is \['stale'\]; add `trained` to it"):
        ArchiveSettings(keep=("stale",), trainer_logprobs=True)
    for keep in (("all",), ("stale", "trained")):
        assert ArchiveSettings.model_validate({"keep": keep, "trainer_logprobs": True}).trainer_logprobs
