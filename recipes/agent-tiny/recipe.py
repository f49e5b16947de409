"""Two digits to be swapped, split by the number, and demonstrations of which half guess.

Invariant: a number belongs to one split for ever; tasks and demonstrations are pure functions of seed and index. The
dataflow server reads `Swaps`, the trainer's warm start `demonstrations`.
"""

import random
from collections.abc import Iterator
from itertools import count

from astraflow.data.generated_tasks import GeneratedTasks
from astraflow.plugins import Demonstration, Message, TaskSpec


class Swaps(GeneratedTasks):
    """The data set: endless, in random access; called by the dataflow server."""

    def task(self, task_id: str, rng: random.Random, *, held_out: bool) -> TaskSpec:
        """A number to swap; one that is held out occurs in no training task and no demonstration."""
        digits = _digits(rng, held_out=held_out)
        return TaskSpec(task_id, _prompt(digits), {"answer": digits[::-1]})


def demonstrations(seed: int) -> Iterator[Demonstration]:
    """Half swap with care, half guess: what reinforcement learning is to tell apart."""
    for index in count():
        digits = _digits(random.Random(f"demonstration/{seed}/{index}"), held_out=False)
        guess = random.Random(f"guess/{seed}/{index}").randint(10, 99)
        careful = f"{digits[1]} {digits[0]} \\boxed{{{digits[::-1]}}}"
        yield Demonstration(_prompt(digits), careful if index % 2 else f"\\boxed{{{guess}}}")


def _digits(rng: random.Random, *, held_out: bool) -> str:
    while True:
        number = rng.randint(10, 99)
        if (number % 9 == 0) is held_out:
            return str(number)


def _prompt(digits: str) -> tuple[Message, ...]:
    return (Message("user", f"Swap {digits}."),)
