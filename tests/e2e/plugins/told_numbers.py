"""A digit to be said again, learned from demonstrations: data set, warm start and reward.

The warm start shows the form and any digit; the data set's training tasks show the right one. A pair of name and digit
is held out or not, for ever.
"""

from collections.abc import Iterator
from itertools import count
from random import Random

from astraflow.plugins import Demonstration, Message, TaskSpec

NAMES = ("Ann", "Ben", "Cal", "Dee", "Eve", "Fay", "Gus", "Hal", "Ida", "Jon")


class ToldNumbers:
    """Endless, in random access."""

    def __init__(self, *, seed: int) -> None:
        self._seed = seed

    def train(self, index: int) -> TaskSpec:
        """A pair, and what is to be said."""
        name, digit = _pair(Random(f"train/{self._seed}/{index}"), held_out=False)
        return TaskSpec(
            f"train-{index}", (_asked(name, digit),), {"digit": digit, "completion": _said(digit)}
        )

    def heldout(self, index: int) -> TaskSpec:
        """Another pair, and nothing to be said."""
        name, digit = _pair(Random(f"heldout/{self._seed}/{index}"), held_out=True)
        return TaskSpec(f"heldout-{index}", (_asked(name, digit),), {"digit": digit})


class SaidIt:
    """1.0 for the digit that was told, else 0.0."""

    def __call__(self, task: TaskSpec, completion: str) -> float:
        return float(completion == _said(task.data["digit"]))


def guesses(seed: int) -> Iterator[Demonstration]:
    """The stream of the warm start."""
    random = Random(seed)
    for _ in count():
        yield Demonstration((_asked(*_pair(random, held_out=False)),), _said(random.randrange(10)))


def _pair(random: Random, *, held_out: bool) -> tuple[str, int]:
    while True:
        name, digit = random.randrange(10), random.randrange(10)
        if ((name + digit) % 5 == 0) is held_out:
            return NAMES[name], digit


def _asked(name: str, digit: int) -> Message:
    return Message("user", f"{name} has {digit}. How many?")


def _said(digit: int) -> str:
    return f"Now {digit}."
