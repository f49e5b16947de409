"""A fixed set of 320 problems, most of which teach nothing: what `data_algorithms` compares algorithms on.

Invariant: 35 % are trivial ("Say 47."), 30 % are sums of two-digit numbers, 35 % cannot be solved, and none of the
number pairs of a held-out sum is in the set or in a demonstration. Every epoch has each problem once, in an order of
its own. Rewarded by the quickstart's own reward.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from functools import cache
from itertools import count

from astraflow.plugins import Demonstration, Message, TaskSpec

NUM_PROBLEMS = 320
_TRIVIAL, _SUMS = 112, 96
_HELD_OUT_SHARE = 0.1
_FLAWED_SHARE = 0.5
_DEMONSTRATED_SUMS = 0.65


class GradedSums:
    """The data set; held out are sums only."""

    def __init__(self, *, seed: int) -> None:
        self._seed = seed

    def train(self, index: int) -> TaskSpec:
        """Training task `index`: a problem of the set, once an epoch."""
        epoch, place = divmod(index, NUM_PROBLEMS)
        number = _order(self._seed, epoch)[place]
        return _task(f"train-{index}", number, *_problem(number, seed=self._seed))

    def heldout(self, index: int) -> TaskSpec:
        """Held-out sum `index`."""
        rng = random.Random(f"heldout/{self._seed}/{index}")
        return _task(f"heldout-{index}", NUM_PROBLEMS + index, *_sum(rng, held_out=True))


def demonstrations(seed: int) -> Iterator[Demonstration]:
    """The warm start: numbers said as asked, and sums with work, of which half have a wrong digit."""
    for index in count():
        rng = random.Random(f"demonstration/{seed}/{index}")
        if rng.random() < _DEMONSTRATED_SUMS:
            a, b = _pair(rng, held_out=False)
            prompt, answer = _asked(a, b), _work(a, b)
            if rng.random() < _FLAWED_SHARE:
                answer = _with_wrong_digit(rng, answer)
        else:
            prompt, total = _trivial(rng)
            answer = f"\\boxed{{{total}}}"
        yield Demonstration(messages=(Message("user", prompt),), completion=answer)


def _problem(number: int, *, seed: int) -> tuple[str, int]:
    rng = random.Random(f"problem/{seed}/{number}")
    if number < _TRIVIAL:
        return _trivial(rng)
    if number < _TRIVIAL + _SUMS:
        return _sum(rng, held_out=False)
    said = rng.randint(10, 99)
    return f"Say {said} twice.", int(f"{said}{said}")


def _trivial(rng: random.Random) -> tuple[str, int]:
    said = rng.randint(10, 99)
    return f"Say {said}.", said


def _sum(rng: random.Random, *, held_out: bool) -> tuple[str, int]:
    a, b = _pair(rng, held_out=held_out)
    return _asked(a, b), a + b


def _pair(rng: random.Random, *, held_out: bool) -> tuple[int, int]:
    while True:
        a, b = rng.randint(10, 99), rng.randint(10, 99)
        digest = hashlib.blake2b(f"{a}+{b}".encode(), digest_size=8).digest()
        if (int.from_bytes(digest, "big") < _HELD_OUT_SHARE * 2**64) is held_out:
            return a, b


def _asked(a: int, b: int) -> str:
    return f"{a} and {b} more. How many?"


def _work(a: int, b: int) -> str:
    """Digit by digit, always right: 47 and 35 give `7+5=2c 4+3=8 \\boxed{82}` (c: carry)."""
    ones, tens = a % 10 + b % 10, a // 10 + b // 10
    carry = ones // 10
    total = tens + carry
    columns = (
        f"{a % 10}+{b % 10}={ones % 10}{'c' * carry} {a // 10}+{b // 10}={total % 10}{'c' * (total // 10)}"
    )
    return f"{columns} \\boxed{{{a + b}}}"


def _with_wrong_digit(rng: random.Random, answer: str) -> str:
    """One digit of the work or of the answer replaced."""
    place = rng.choice([index for index, sign in enumerate(answer) if sign.isdigit()])
    wrong = rng.choice([digit for digit in "0123456789" if digit != answer[place]])
    return answer[:place] + wrong + answer[place + 1 :]


@cache
def _order(seed: int, epoch: int) -> list[int]:
    numbers = list(range(NUM_PROBLEMS))
    random.Random(f"epoch/{seed}/{epoch}").shuffle(numbers)
    return numbers


def _task(task_id: str, number: int, prompt: str, total: int) -> TaskSpec:
    data = {"total": total, "problem": f"p{number}"}
    return TaskSpec(task_id=task_id, messages=(Message("user", prompt),), data=data)
