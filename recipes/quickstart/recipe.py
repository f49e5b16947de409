"""Addition word problems: the quickstart's task, held-out split, flawed demonstrations and reward.

A problem is a pure function of (seed, index), so any daemon can rebuild any task without a file. The invariant:
a number pair (a, b) belongs to one split for ever, by a hash of the pair alone, so neither the warm start nor
the reinforcement learning ever sees a held-out pair in any wording. The dataflow server reads
`AdditionProblems`, nodes call `BoxedSum`, and the trainer's tokenizer and warm start read `demonstrations`.
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
    "{name} has {a} {thing} and gets {b} more. How many now?",
    "{name} buys {a} {thing}, then {b} more. How many in total?",
    "There are {a} {thing} here and {b} there. How many in all?",
)
SMALLEST, LARGEST = 10, 99
HELD_OUT_SHARE = 0.1
CAREFUL_SHARE = 0.5
_BOX = re.compile(r"\\boxed\{([^{}]*)\}")


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One word problem; `a` and `b` are the two-digit numbers to add."""

    a: int
    b: int
    prompt: str

    @property
    def total(self) -> int:
        return self.a + self.b


def is_held_out(a: int, b: int) -> bool:
    """Whether the ordered pair belongs to the held-out split; depends on nothing but the pair."""
    digest = hashlib.blake2b(f"{a}+{b}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") < HELD_OUT_SHARE * 2**64


def problem(index: int, *, seed: int, held_out: bool = False) -> Problem:
    """The problem with this index in the endless stream of one seed and one split; needs no earlier index."""
    return _draw(random.Random(f"problem/{seed}/{held_out}/{index}"), held_out=held_out)


def careful_answer(a: int, b: int) -> str:
    """Digit-by-digit work, always right: 47 and 35 give `7+5=2c 4+3=8 \\boxed{82}` (c is the carry)."""
    carry = (a % 10 + b % 10) // 10
    ones = _column(a % 10, b % 10, carried=0)
    tens = _column(a // 10, b // 10, carried=carry)
    return f"{ones} {tens} \\boxed{{{a + b}}}"


def careless_answer(rng: random.Random) -> str:
    """A guess without work: any possible sum, so right about once in 180 times."""
    return f"\\boxed{{{rng.randint(2 * SMALLEST, 2 * LARGEST)}}}"


def demonstration(index: int, *, seed: int) -> tuple[Problem, str]:
    """Demonstration `index` of the warm start: careful with probability `CAREFUL_SHARE`, else careless."""
    rng = random.Random(f"demonstration/{seed}/{index}")
    shown = _draw(rng, held_out=False)
    if rng.random() < CAREFUL_SHARE:
        return shown, careful_answer(shown.a, shown.b)
    return shown, careless_answer(rng)


def demonstrations(seed: int) -> Iterator[Demonstration]:
    """The endless stream of the warm start, flawed on purpose."""
    for index in count():
        shown, answer = demonstration(index, seed=seed)
        yield Demonstration(messages=(Message("user", shown.prompt),), completion=answer)


def score(completion: str, *, total: int) -> float:
    """1.0 if the last complete \\boxed{} holds exactly the sum in decimal digits, else 0.0."""
    boxes = _BOX.findall(completion)
    return float(bool(boxes) and boxes[-1].strip() == str(total))


class AdditionProblems:
    """The data set: endless, in random access; called by the dataflow server."""

    def __init__(self, *, seed: int) -> None:
        self._seed = seed

    def train(self, index: int) -> TaskSpec:
        """Training task `index`."""
        return _task(f"train-{index}", problem(index, seed=self._seed))

    def heldout(self, index: int) -> TaskSpec:
        """Held-out task `index`; its number pair occurs in no training task and no demonstration."""
        return _task(f"heldout-{index}", problem(index, seed=self._seed, held_out=True))


class BoxedSum:
    """The reward: 1.0 for the correct sum in the last box, else 0.0; called by the workflow on the node."""

    def __call__(self, task: TaskSpec, completion: str) -> float:
        return score(completion, total=task.data["total"])


def _draw(rng: random.Random, *, held_out: bool) -> Problem:
    while True:
        a, b = rng.randint(SMALLEST, LARGEST), rng.randint(SMALLEST, LARGEST)
        if is_held_out(a, b) is held_out:
            break
    text = rng.choice(TEMPLATES).format(name=rng.choice(NAMES), thing=rng.choice(THINGS), a=a, b=b)
    return Problem(a=a, b=b, prompt=text)


def _column(x: int, y: int, *, carried: int) -> str:
    """One column of the written sum, `7+5=2c`; the carry from the right counts but is not written again."""
    total = x + y + carried
    return f"{x}+{y}={total % 10}{'c' * (total // 10)}"


def _task(task_id: str, shown: Problem) -> TaskSpec:
    return TaskSpec(task_id=task_id, messages=(Message("user", shown.prompt),), data={"total": shown.total})
