"""A number to be found by halving the range it lies in, and demonstrations of which half count up instead.

Invariant: a range belongs to one split for ever; tasks and demonstrations are pure functions of seed and index. The
dataflow server reads `Ranges`, the trainer's warm start `demonstrations`, the node plays `NumberSearch`.
"""

import random
from collections.abc import Iterator
from itertools import count

from astraflow.data.generated_tasks import GeneratedTasks
from astraflow.plugins import Demonstration, Message, Observation, TaskSpec

NUMBERS = 15
"""In a range. Halving finds each of them within four guesses, counting up finds four of them."""
GUESSES = 4


class NumberSearch:
    """The environment: each wrong guess is answered by the numbers that are left."""

    def __init__(self) -> None:
        self._low, self._high, self._secret, self._left = 0, 0, 0, GUESSES

    async def reset(self, task: TaskSpec) -> Observation:
        """Start with the range of the task."""
        self._low, self._secret = int(task.data["low"]), int(task.data["secret"])
        self._high, self._left = self._low + NUMBERS - 1, GUESSES
        return self._shown()

    async def step(self, action: Message) -> Observation:
        """Take a guess. What is no number of the range costs a guess and tells nothing."""
        self._left -= 1
        text = action.content.strip()
        guess = int(text) if text.isascii() and text.isdigit() and len(text) <= 2 else -1
        if guess == self._secret:
            return Observation(reward=1.0, done=True, metrics={"guesses": float(GUESSES - self._left)})
        if self._low <= guess < self._secret:
            self._low = guess + 1
        elif self._secret < guess <= self._high:
            self._high = guess - 1
        return self._shown()

    async def close(self) -> None:
        """Nothing is held."""

    def _shown(self) -> Observation:
        message = Message("user", f"{self._low}-{self._high}?")
        return Observation(messages=(message,), done=self._left == 0)


class Ranges(GeneratedTasks):
    """The data set: endless, in random access; called by the dataflow server."""

    def task(self, task_id: str, rng: random.Random, *, held_out: bool) -> TaskSpec:
        """A number of a range; a range that is held out occurs in no training task and no demonstration."""
        low = _low(rng, held_out=held_out)
        return TaskSpec(task_id, (), {"low": low, "secret": low + rng.randrange(NUMBERS)})


def demonstrations(seed: int) -> Iterator[Demonstration]:
    """One guess of a game each: half of them halve, half take the lowest. Reinforcement learning tells them apart."""
    for index in count():
        rng = random.Random(f"demonstration/{seed}/{index}")
        low = _low(rng, held_out=False)
        secret = low + rng.randrange(NUMBERS)
        yield _guess_of_a_game(rng, (low, low + NUMBERS - 1), secret, halves=index % 2 == 0)


def _guess_of_a_game(
    rng: random.Random, numbers: tuple[int, int], secret: int, *, halves: bool
) -> Demonstration:
    low, high = numbers
    chat = [Message("user", f"{low}-{high}?")]
    for _ in range(rng.randrange(GUESSES)):
        guess = rng.choice([low, (low + high) // 2])  # what came before may be either
        if guess == secret:
            break
        low, high = (guess + 1, high) if guess < secret else (low, guess - 1)
        chat += [Message("assistant", str(guess)), Message("user", f"{low}-{high}?")]
    return Demonstration(tuple(chat), str((low + high) // 2 if halves else low))


def _low(rng: random.Random, *, held_out: bool) -> int:
    while True:
        low = rng.randint(10, 99 - NUMBERS)
        if (low % 9 == 0) is held_out:
            return low
