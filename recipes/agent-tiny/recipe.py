"""Two digits to be swapped, split by the number, and demonstrations of which half guess.

Invariant: a number belongs to one split for ever; tasks and demonstrations are pure functions of seed and index. The
dataflow server reads `Swaps`, the trainer's warm start `demonstrations`.
"""

import random
from collections.abc import Iterator
from itertools import count

from astraflow.plugins import Demonstration, Message, TaskSpec


class Swaps:
    """The data set: endless, in random access; called by the dataflow server."""

    def __init__(self, *, seed: int) -> None:
        self._seed = seed

    def train(self, index: int) -> TaskSpec:
        """Training task `index`."""
        return _task(f"train-{index}", _digits(f"train/{self._seed}/{index}", held_out=False))

    def heldout(self, index: int) -> TaskSpec:
        """Held-out task `index`; its number occurs in no training task and no demonstration."""
        return _task(f"heldout-{index}", _digits(f"heldout/{self._seed}/{index}", held_out=True))


def demonstrations(seed: int) -> Iterator[Demonstration]:
    """Half swap with care, half guess: what reinforcement learning is to tell apart."""
    for index in count():
        digits = _digits(f"demonstration/{seed}/{index}", held_out=False)
        guess = random.Random(f"guess/{seed}/{index}").randint(10, 99)
        careful = f"{digits[1]} {digits[0]} \\boxed{{{digits[::-1]}}}"
        yield Demonstration(_prompt(digits), careful if index % 2 else f"\\boxed{{{guess}}}")


def _digits(key: str, *, held_out: bool) -> str:
    rng = random.Random(key)
    while True:
        number = rng.randint(10, 99)
        if (number % 9 == 0) is held_out:
            return str(number)


def _prompt(digits: str) -> tuple[Message, ...]:
    return (Message("user", f"Swap {digits}."),)


def _task(task_id: str, digits: str) -> TaskSpec:
    return TaskSpec(task_id, _prompt(digits), {"answer": digits[::-1]})
