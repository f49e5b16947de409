"""What trainers recorded that they trained on, checked: for tests that killed somebody.

A trainer writes one ledger line per step it takes, again when it replays one. The newest line of a step (highest
epoch, then last written) is the one that counts. `audit` fails naming every trajectory that counts in two steps,
every step that is missing, and every replay that was not verbatim.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Line = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class LedgerAudit:
    """Ledgers in which nothing is wrong."""

    step_of: Mapping[str, int]
    """Trajectory id to the one step that counts it."""
    last_step: int
    num_replayed: int
    """Lines of steps taken before: work done again, counted once."""

    @property
    def trained_ids(self) -> set[str]:
        """Everything that was trained on, skipped steps included."""
        return set(self.step_of)


def audit(*ledgers: Path, redis_lost_data: bool = False) -> LedgerAudit:
    """Read the ledgers of all trainers of one policy. Raises AssertionError naming everything that is wrong.

    A Redis that lost its tail may bind other groups to a step again, so only then a replay may differ.
    """
    lines = [json.loads(text) for path in ledgers if path.exists() for text in path.read_text().splitlines()]
    counted: dict[int, Line] = {}
    for line in lines:
        if line["step"] not in counted or line["epoch"] >= counted[line["step"]]["epoch"]:
            counted[line["step"]] = line
    wrong = [*_missing(counted), *_doubled(counted)]
    if not redis_lost_data:
        wrong += _not_verbatim(lines, counted)
    assert not wrong, "\n".join(wrong)
    return LedgerAudit(
        step_of={item: step for step, line in counted.items() for item in line["trajectory_ids"]},
        last_step=max(counted, default=0),
        num_replayed=len(lines) - len(counted),
    )


def _missing(counted: Mapping[int, Line]) -> Iterator[str]:
    for step in range(1, max(counted, default=0) + 1):
        if step not in counted:
            yield f"step {step} was never taken"


def _doubled(counted: Mapping[int, Line]) -> Iterator[str]:
    steps: dict[str, int] = {}
    for step, line in sorted(counted.items()):
        for trajectory_id in line["trajectory_ids"]:
            first = steps.setdefault(trajectory_id, step)
            if first != step:
                yield f"trajectory {trajectory_id} was trained on in steps {first} and {step}"
        if len(set(line["trajectory_ids"])) != len(line["trajectory_ids"]):
            yield f"step {step} holds a trajectory twice"


def _not_verbatim(lines: Sequence[Line], counted: Mapping[int, Line]) -> Iterator[str]:
    for line in lines:
        newest = counted[line["step"]]
        for key in ("batch_id", "digest", "stage", "trajectory_ids"):
            if line[key] != newest[key]:
                yield (
                    f"step {line['step']} was {key} {line[key]} under epoch {line['epoch']} and "
                    f"{newest[key]} under epoch {newest['epoch']}"
                )
