"""The audit of ledgers finds what must never be trained on twice; the tests of killed trainers rely on that."""

import json
from pathlib import Path

import pytest

from support.ledger_audit import audit


def line(step: int, *ids: str, epoch: int = 1, stage: str = "TRAINED") -> dict[str, object]:
    """A line as a trainer writes it."""
    batch = {"batch_id": f"b{step}", "digest": f"{step:02x}"}
    return {"step": step, "epoch": epoch, **batch, "stage": stage, "trajectory_ids": list(ids)}


def written(folder: Path, *lines: dict[str, object], name: str = "ledger.jsonl") -> Path:
    """A ledger with these lines."""
    path = folder / name
    path.write_text("".join(json.dumps(item) + "\n" for item in lines))
    return path


def test_replayed_steps_count_once(tmp_path: Path) -> None:
    first = written(tmp_path, line(1, "a", "b"), line(2, "c"))
    second = written(tmp_path, line(2, "c", epoch=2), line(3, "d", epoch=2), name="other.jsonl")
    found = audit(first, second, tmp_path / "of a trainer that never trained")
    assert found.step_of == {"a": 1, "b": 1, "c": 2, "d": 3}
    assert (found.last_step, found.num_replayed, found.trained_ids) == (3, 1, {"a", "b", "c", "d"})


FINDINGS = [
    ([line(1, "a"), line(2, "a")], "trajectory a was trained on in steps 1 and 2"),
    ([line(1, "a", "a")], "step 1 holds a trajectory twice"),
    ([line(1, "a"), line(3, "c")], "step 2 was never taken"),
    ([line(1, "a"), line(1, "b", epoch=2)], r"step 1 was trajectory_ids \['a'\] under epoch 1"),
    ([line(1, "a"), line(1, "a", epoch=2, stage="SKIPPED")], "step 1 was stage TRAINED"),
]


@pytest.mark.parametrize(("lines", "finding"), FINDINGS)
def test_what_must_not_happen_is_found(tmp_path: Path, lines: list[dict[str, object]], finding: str) -> None:
    with pytest.raises(AssertionError, match=finding):
        audit(written(tmp_path, *lines))


def test_a_redis_that_lost_data_may_bind_other_groups_to_a_step(tmp_path: Path) -> None:
    ledger = written(tmp_path, line(1, "a"), line(2, "b"), line(2, "c", epoch=2), line(3, "b", epoch=2))
    assert audit(ledger, redis_lost_data=True).step_of == {"a": 1, "c": 2, "b": 3}
