"""Rows that this trainer cannot train on, found before anything is computed: they go with their groups, by name.

Nodes and the server refuse such rows as poison; what comes here all the same was pushed before a setting was changed,
or has a model whose vocabulary only its trainer knows. Invariant: every rank leaves out the same groups, and one bad
row never ends a run. Called by the training step.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from astraflow.recipe import RowLimits
from astraflow.trajectories import BadTrajectory, check_row
from astraflow_kit.log import get_logger
from astraflow_trainer.batches.routing import RouterShape
from astraflow_trainer.batches.rows import Group, TrainingRow
from astraflow_trainer.ranks.reductions import Ranks

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Fitting:
    """This rank's rows that can be trained on."""

    rows: Sequence[TrainingRow]
    num_left_out: int
    """Rows that are left out, over all ranks."""


def fitting_rows(
    rows: Sequence[TrainingRow], *, limits: RowLimits, ranks: Ranks, routers: RouterShape | None = None
) -> Fitting:
    """Leave out every group (of one task and role) with a row on any rank that is beyond `limits`, or whose recorded
    experts are not of the model's `routers` (None: of a dense one); a collective.
    """
    unfit = groups_left_out(_problems(rows, limits, routers or RouterShape()), ranks=ranks)
    if not unfit:
        return Fitting(rows, 0)
    kept = [row for row in rows if row.group not in unfit]
    return Fitting(kept, int(ranks.sum(torch.tensor(len(rows) - len(kept)))))


def groups_left_out(problems: Mapping[Group, BadTrajectory], *, ranks: Ranks) -> set[Group]:
    """Return the groups with a problem on any rank, having named this rank's; a collective."""
    for (task_id, role), problem in problems.items():
        log.warning(
            "batch.group_left_out", task_id=task_id, role=role, reason=problem.slug, detail=problem.detail
        )
    everybodys = ranks.all_gather(json.dumps(list(problems)).encode())
    return {(task_id, role) for part in everybodys for task_id, role in json.loads(part)}


def _problems(
    rows: Sequence[TrainingRow], limits: RowLimits, routers: RouterShape
) -> Mapping[Group, BadTrajectory]:
    """What is wrong with the first bad row of each group."""
    problems: dict[Group, BadTrajectory] = {}
    for row in rows:
        try:
            check_row(row.trajectory_id, row.token_ids, limits)
            routers.require(row.trajectory_id, row.expert_routing)
        except BadTrajectory as problem:
            problems.setdefault(row.group, problem)
    return problems
