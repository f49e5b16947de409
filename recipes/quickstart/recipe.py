"""Addition word problems: the quickstart's task, its held-out split, its flawed demonstrations and its reward.

A problem is a pure function of (seed, index), so any daemon can rebuild any task without a file. The invariant: a number
pair (a, b) belongs to one split for ever, by a hash of the pair alone, so neither the warm start nor the reinforcement
learning ever sees a held-out pair in any wording. The dataflow server reads `AdditionProblems`, nodes call `BoxedSum`,
the trainer's warm start and tokenizer read `demonstrations`.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

from astraflow.plugins import Demonstration, Message, TaskSpec

NAMES = "Ann Ben Cal Dee Eve Fay Gus Hal Ida Jon".split()
THINGS = "apples coins books cards shells pens".split()
TEMPLATES = (
    "{name} has {a} {thing} and gets {b} more. How many {thing} does {name} have?",
    "{name} bought {a} {thing} on Monday and {b} {thing} on Friday. How many {thing} in total?",
    "There are {a} {thing} in a box and {b} {thing} in a bag. How many {thing} are there?",
)
HELD_OUT_SHARE = 0.1
CAREFUL_SHARE = 0.5
CARELESS_ERRORS = (-20, -10, -2, -1, 0, 1, 2, 10)
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


def _draw(rng: random.Random, *, held_out: bool) -> Problem:
    a, b = rng.randint(10, 99), rng.randint(10, 99)
    while is_held_out(a, b) is not held_out:
        a, b = rng.randint(10, 99), rng.randint(10, 99)
    text = rng.choice(TEMPLATES).format(name=rng.choice(NAMES), thing=rng.choice(THINGS), a=a, b=b)
    return Problem(a=a, b=b, prompt=text)


def careful_answer(a: int, b: int) -> str:
    """Digit-by-digit scratch work, always right: 47 and 35 give `7+5=2c 4+3=8 \\boxed{82}` (c is the carry)."""
    ones, tens = a % 10 + b % 10, a // 10 + b // 10
    carry = ones // 10
    work = f"{a % 10}+{b % 10}={ones % 10}{'c' * carry} {a // 10}+{b // 10}={(tens + carry) % 10}{'c' * ((tens + carry) // 10)}"
    return f"{work} \\boxed{{{a + b}}}"


def blurted_answer(a: int, b: int, *, rng: random.Random) -> str:
    """An answer without work, wrong seven times out of eight."""
    return f"\\boxed{{{max(0, a + b + rng.choice(CARELESS_ERRORS))}}}"


def demonstration(index: int, *, seed: int, careful_share: float) -> tuple[str, str]:
    """(prompt, answer) number `index` of the warm start: careful with probability `careful_share`, else blurted."""
    rng = random.Random(f"demonstration/{seed}/{index}")
    shown = _draw(rng, held_out=False)
    if rng.random() < careful_share:
        return shown.prompt, careful_answer(shown.a, shown.b)
    return shown.prompt, blurted_answer(shown.a, shown.b, rng=rng)


def score(text: str, *, total: int) -> float:
    """1.0 if the last complete \\boxed{} holds exactly the sum in decimal digits, else 0.0."""
    boxes = _BOX.findall(text)
    return float(bool(boxes) and boxes[-1].strip() == str(total))


class AdditionProblems:
    """The data set; called by the dataflow server."""

    def __init__(self, *, seed: int) -> None:
        self._seed = seed

    def train(self, index: int) -> TaskSpec:
        """Training task `index` of an endless stream."""
        return _task("train", index, problem(index, seed=self._seed))

    def heldout(self, index: int) -> TaskSpec:
        """Held-out task `index`; its number pair occurs in no training task and no demonstration."""
        return _task("heldout", index, problem(index, seed=self._seed, held_out=True))


class BoxedSum:
    """The reward; called by the workflow on the node."""

    def __call__(self, task: TaskSpec, completion: str) -> float:
        return score(completion, total=task.data["total"])


def demonstrations(seed: int) -> Iterator[Demonstration]:
    """The warm start's endless stream, deliberately flawed: half careful, half blurted."""
    for index in count():
        prompt, answer = demonstration(index, seed=seed, careful_share=CAREFUL_SHARE)
        yield Demonstration(messages=(Message("user", prompt),), completion=answer)


def _task(split: str, index: int, shown: Problem) -> TaskSpec:
    messages = (Message("user", shown.prompt),)
    return TaskSpec(task_id=f"{split}-{index}", messages=messages, data={"total": shown.total})
