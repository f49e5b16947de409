"""A data set of numbers: the n-th task of a collection that somebody else holds, such as a taskset of `verifiers`.

Invariant: that of `RowTasks`, with numbers for rows. Named by a recipe as
`astraflow_environment.adapters.task_numbers:TaskNumbers`.
"""

from astraflow.data.task_files import RowTasks
from astraflow.plugins import Message, TaskSpec


class TaskNumbers(RowTasks[int]):
    """`data["idx"]` is the number: those below `num_heldout` are held out, the next `num_train` are trained on."""

    def __init__(self, *, seed: int, num_train: int, num_heldout: int = 0) -> None:
        if num_train < 1 or num_heldout < 0:
            raise ValueError(
                f"num_train is {num_train}, num_heldout {num_heldout}; have one to train on at least"
            )
        numbers = range(num_heldout + num_train)
        super().__init__(train=numbers[num_heldout:], heldout=numbers[:num_heldout], seed=seed)

    def task(self, task_id: str, row: int) -> TaskSpec:
        """Return the task of a number."""
        return TaskSpec(task_id, (Message("user", f"Task {row}."),), {"idx": row})
