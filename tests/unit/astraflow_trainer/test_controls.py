"""Wishes of operators outlive a claim that Redis lost, and nothing else is taken for a wish to stop."""

import pytest

from astraflow.errors import PreconditionError, UnavailableError
from astraflow_trainer.controls import Controls


def _take(controls: Controls) -> bool:
    """Whether training should stop."""
    orders = controls.take(waiting=lambda _reason: None)
    return orders is not None and orders.stop


def test_training_goes_on_after_a_failure_that_a_new_claim_mended() -> None:
    controls = Controls()
    controls.at(3)
    controls.ended(UnavailableError("the trainer is ending: its claim is gone"))
    with pytest.raises(PreconditionError, match="its claim is gone"):
        controls.checkpoint()
    with pytest.raises(PreconditionError, match="stopping"):
        controls.pause("maintenance")
    controls.at(3)  # the loop begins again
    assert not _take(controls)
    assert not controls.checkpoint().done()


def test_a_wish_to_stop_outlives_the_failure() -> None:
    controls = Controls()
    controls.at(3)
    assert controls.stop_after_step() == 3
    controls.ended(UnavailableError("the trainer is ending: its claim is gone"))
    controls.at(3)
    assert _take(controls)
