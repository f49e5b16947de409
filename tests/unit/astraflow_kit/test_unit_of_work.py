"""Units of work: one id per task and per step, on log lines and on calls."""

import io
import json

import pytest

from astraflow.client import AsyncClient
from astraflow_kit import log
from astraflow_kit.unit_of_work import step_correlation, task_correlation, unit_of_work


async def test_inside_the_block_lines_and_calls_carry_the_id_and_outside_neither_does() -> None:
    lines = io.StringIO()
    log.configure("test", log_format="json", stream=lines)
    async with AsyncClient("127.0.0.1:1") as client:
        with unit_of_work("solver/step-7", step=7):
            log.get_logger("test").info("inside.block")
            inside = dict(client._metadata())
        log.get_logger("test").info("outside.block")
        outside = dict(client._metadata())
    first, second = map(json.loads, lines.getvalue().splitlines())
    assert (first["correlation_id"], first["step"]) == ("solver/step-7", 7)
    assert inside == {"x-correlation-id": "solver/step-7"}
    assert "correlation_id" not in second
    assert outside == {}


def test_a_task_is_found_by_its_own_id_and_a_step_by_policy_and_number() -> None:
    assert task_correlation("train-17") == "train-17"
    assert step_correlation("solver", 7) == "solver/step-7"


@pytest.mark.parametrize("task_id", ["x" * 65, "ü", "a\nb", ""])
def test_an_id_that_metadata_cannot_carry_is_stood_for_by_the_same_digest_everywhere(task_id: str) -> None:
    stand_in = task_correlation(task_id)
    assert stand_in == task_correlation(task_id)
    assert len(stand_in) == 32
    with unit_of_work(stand_in):
        pass
