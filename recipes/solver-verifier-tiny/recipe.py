"""Subtraction word problems for a solver and a verifier: tasks, held-out split, flawed demonstrations, reward.

Everything is a pure function of (seed, index). The invariant: a number pair (a, b) belongs to one split for ever, by
a hash of the pair alone, so neither the two warm starts nor the reinforcement learning ever see a held-out pair. The
dataflow server reads `SubtractionProblems`, nodes call `BoxedDifference`, and each policy's trainer reads its own
demonstrations.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

from astraflow.plugins import Demonstration, Message, TaskSpec

NAMES = ("Ann", "Ben", "Cal", "Dee", "Eve", "Fay", "Gus", "Hal", "Ida", "Jon")
THINGS = ("apples", "coins", "books", "cards", "shells", "pens")
TEMPLATES = (
    "{name} has {a} {thing} and gives away {b}. How many are left?",
    "{name} had {a} {thing} and lost {b}. How many now?",
    "Of {a} {thing}, {b} are sold. How many remain?",
)
SMALLEST, LARGEST = 10, 99  # of both numbers and of the difference
HELD_OUT_SHARE = 0.1
CAREFUL_SHARE = 0.5
_BOX = re.compile(r"\\boxed\{([^{}]*)\}")


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One word problem; `a` minus `b` is asked."""

    a: int
    b: int
    prompt: str

    @property
    def difference(self) -> int:
        return self.a - self.b


def is_held_out(a: int, b: int) -> bool:
    """Whether the pair belongs to the held-out split; depends on nothing but the pair."""
    digest = hashlib.blake2b(f"{a}-{b}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") < HELD_OUT_SHARE * 2**64


def problem(index: int, *, seed: int, held_out: bool = False) -> Problem:
    """The problem with this index in the endless stream of one seed and one split; needs no earlier index."""
    return _draw(random.Random(f"problem/{seed}/{held_out}/{index}"), held_out=held_out)


def careful_answer(a: int, b: int) -> str:
    """Digit by digit, always right: 82 and 35 give `2-5=7b 8-3=4 \\boxed{47}` (b is a borrow, taken from the 8)."""
    borrow = a % 10 < b % 10
    ones = f"{a % 10}-{b % 10}={(a - b) % 10}{'b' * borrow}"
    return f"{ones} {a // 10}-{b // 10}={(a - b) // 10} \\boxed{{{a - b}}}"


def careful_check(a: int, b: int, proposed: int) -> str:
    """Adds back, column by column, always right: `7+5=2c:2y 4+3=8:8y approve` for 82, 35 and 47; for 48 instead of 47
    `8+5=3c:2n 4+3=8:8y reject` (c is a carry; after the colon stands the digit of 82, y or n says if they agree)."""
    total = proposed + b
    carry = (proposed % 10 + b % 10) // 10
    ones = f"{proposed % 10}+{b % 10}={total % 10}{'c' * carry}:{a % 10}{'ny'[total % 10 == a % 10]}"
    tens = f"{proposed // 10}+{b // 10}={total // 10}:{a // 10}{'ny'[total // 10 == a // 10]}"
    return f"{ones} {tens} {'approve' if total == a else 'reject'}"


def solver_demonstration(index: int, *, seed: int) -> tuple[Problem, str]:
    """Careful with probability `CAREFUL_SHARE`, else a guess without work, right about once in 80 times."""
    rng = random.Random(f"solver/{seed}/{index}")
    shown = _draw(rng, held_out=False)
    if rng.random() < CAREFUL_SHARE:
        return shown, careful_answer(shown.a, shown.b)
    return shown, f"\\boxed{{{rng.randint(SMALLEST, LARGEST - SMALLEST)}}}"


def verifier_demonstration(index: int, *, seed: int) -> tuple[Problem, int, str]:
    """A proposal, right half of the time, and a check of it: careful, or a verdict by the toss of a coin."""
    rng = random.Random(f"verifier/{seed}/{index}")
    shown = _draw(rng, held_out=False)
    slip = shown.difference + rng.choice((-10, -1, 1, 10))
    proposed = rng.choice(
        (shown.difference, shown.difference, slip, rng.randint(SMALLEST, LARGEST - SMALLEST))
    )
    if rng.random() < CAREFUL_SHARE:
        return shown, proposed, careful_check(shown.a, shown.b, proposed)
    return shown, proposed, rng.choice(("approve", "reject"))


def solver_demonstrations(seed: int) -> Iterator[Demonstration]:
    """The endless stream of the solver's warm start, flawed on purpose."""
    for index in count():
        shown, answer = solver_demonstration(index, seed=seed)
        yield Demonstration(messages=(Message("user", shown.prompt),), completion=answer)


def verifier_demonstrations(seed: int) -> Iterator[Demonstration]:
    """The endless stream of the verifier's warm start; prompts as raas.workflow in recipe.yaml makes them."""
    for index in count():
        shown, proposed, check = verifier_demonstration(index, seed=seed)
        messages = (Message("user", f"{shown.prompt} Answer: {proposed}"),)
        yield Demonstration(messages=messages, completion=check)


class SubtractionProblems:
    """The data set: endless, in random access; called by the dataflow server."""

    def __init__(self, *, seed: int) -> None:
        self._seed = seed

    def train(self, index: int) -> TaskSpec:
        """Training task `index`."""
        return _task(f"train-{index}", problem(index, seed=self._seed))

    def heldout(self, index: int) -> TaskSpec:
        """Held-out task `index`; its number pair occurs in no training task and no demonstration."""
        return _task(f"heldout-{index}", problem(index, seed=self._seed, held_out=True))


class BoxedDifference:
    """The reward of an answer: 1.0 for exactly the difference in the last box, else 0.0."""

    def __call__(self, task: TaskSpec, completion: str) -> float:
        boxes = _BOX.findall(completion)
        return float(bool(boxes) and boxes[-1].strip() == str(task.data["difference"]))


def _draw(rng: random.Random, *, held_out: bool) -> Problem:
    while True:
        a, b = rng.randint(2 * SMALLEST, LARGEST), rng.randint(SMALLEST, LARGEST - SMALLEST)
        if a - b >= SMALLEST and is_held_out(a, b) is held_out:
            break
    text = rng.choice(TEMPLATES).format(name=rng.choice(NAMES), thing=rng.choice(THINGS), a=a, b=b)
    return Problem(a=a, b=b, prompt=text)


def _task(task_id: str, shown: Problem) -> TaskSpec:
    data = {"difference": shown.difference}
    return TaskSpec(task_id=task_id, messages=(Message("user", shown.prompt),), data=data)
