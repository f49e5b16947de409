"""A data set of numbers: the n-th task of a collection that somebody else holds, such as a taskset of `verifiers`.

Invariant: no number is trained on and held out; every epoch has each number once, in an order of its own. Named by a
recipe as `astraflow_environment.adapters.task_numbers:TaskNumbers`.
"""

import random
from functools import lru_cache

from astraflow.plugins import Message, TaskSpec


class TaskNumbers:
    """`data["idx"]` is the number: those below `num_heldout` are held out, the next `num_train` are trained on."""

    def __init__(self, *, seed: int, num_train: int, num_heldout: int = 0) -> None:
        if num_train < 1 or num_heldout < 0:
            raise ValueError(
                f"num_train is {num_train}, num_heldout {num_heldout}; have one to train on at least"
            )
        self._num_train, self._num_heldout = num_train, num_heldout
        self._order = lru_cache(maxsize=2)(lambda epoch: _shuffled(num_train, seed=f"{seed}/{epoch}"))

    def train(self, index: int) -> TaskSpec:
        """Training task `index`: without end, epoch after epoch."""
        epoch, place = divmod(index, self._num_train)
        return _task(f"train-{index}", self._num_heldout + self._order(epoch)[place])

    def heldout(self, index: int) -> TaskSpec | None:
        """Held-out task `index`; None behind the last."""
        return _task(f"heldout-{index}", index) if index < self._num_heldout else None


def _shuffled(number: int, *, seed: str) -> list[int]:
    return random.Random(seed).sample(range(number), number)


def _task(task_id: str, idx: int) -> TaskSpec:
    return TaskSpec(task_id, (Message("user", f"Task {idx}."),), {"idx": idx})
