"""A data set whose tasks are drawn, without end, instead of read.

Invariant: a task follows from seed, split and index alone, so that a daemon makes it again without a file. Used by data
sets of recipes; standard library only.
"""

from __future__ import annotations

import random

from astraflow.plugins import TaskSpec

__all__ = ["GeneratedTasks"]


class GeneratedTasks:
    """A data set without end; a subclass says with `task` what is drawn, and keeps the two splits apart."""

    def __init__(self, *, seed: int) -> None:
        self._seed = seed

    def task(self, task_id: str, rng: random.Random, *, held_out: bool) -> TaskSpec:
        """Return a task drawn with `rng`; one that is `held_out` must be none that is trained on."""
        raise NotImplementedError

    def train(self, index: int) -> TaskSpec:
        """Return training task `index`."""
        return self._drawn("train", index)

    def heldout(self, index: int) -> TaskSpec:
        """Return held-out task `index`."""
        return self._drawn("heldout", index)

    def _drawn(self, split: str, index: int) -> TaskSpec:
        rng = random.Random(f"{split}/{self._seed}/{index}")
        return self.task(f"{split}-{index}", rng, held_out=split == "heldout")
