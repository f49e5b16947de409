"""GSM8K from a folder, and at small size generated word problems of the same shape, with flawed demonstrations.

Invariant: a problem belongs to one split for ever: GSM8K's by its files, a generated one by a hash of its two numbers.
The dataflow server reads `Gsm8k` or `Sums`, trainers' warm starts the demonstrations; both sizes have the workflow and
the reward that recipe.yaml names.
"""

import hashlib
import random
import re
from collections.abc import Iterator
from itertools import count, islice
from pathlib import Path
from typing import Any

from astraflow.data.generated_tasks import GeneratedTasks
from astraflow.data.task_files import RowTasks, read_rows
from astraflow.plugins import Demonstration, Message, TaskSpec

ASK = "\n\nThink step by step, and give the final answer within \\boxed{}."
FETCH = (
    "git clone https://github.com/openai/grade-school-math data/grade-school-math, or give the folder: "
    "--set run.dataset.with.folder=FOLDER"
)
NAMES = ("Ann", "Ben", "Cal", "Dee", "Eve", "Fay", "Gus", "Hal", "Ida", "Jon")
THINGS = ("apples", "coins", "books", "cards", "shells", "pens")
TEMPLATES = (
    "{name} has {a} {thing} and gets {b} more. How many now?",
    "{name} buys {a} {thing}, then {b} more. How many in total?",
    "There are {a} {thing} here and {b} there. How many in all?",
)
HELD_OUT_SHARE = 0.1


class Gsm8k(RowTasks[dict[str, Any]]):
    """GSM8K as its authors publish it: `train.jsonl` and `test.jsonl` (or .gz) of `question` and `answer`."""

    def __init__(
        self, *, seed: int, folder: Path = Path("data/grade-school-math/grade_school_math/data")
    ) -> None:
        files, fields = (folder / "train.jsonl", folder / "test.jsonl"), {"question": str, "answer": str}
        train, test = (read_rows(file, fields=fields, remedy=FETCH) for file in files)
        super().__init__(train=train, heldout=test, seed=seed)

    def task(self, task_id: str, row: dict[str, Any]) -> TaskSpec:
        """The question, the answer behind the `####` of its solution, and the solution for who learns it by heart."""
        answer = row["answer"].rpartition("####")[2].strip().replace(",", "")
        steps = re.sub(r"<<.*?>>|\n*####.*", "", row.get("solution", row["answer"]))
        data = {"answer": answer, "problem": row["question"], "completion": f"{steps}\n\\boxed{{{answer}}}"}
        return TaskSpec(task_id, (Message("user", row["question"] + ASK),), data)


class Sums(GeneratedTasks):
    """Endless sums of two numbers in words; called by the dataflow server at small size."""

    def task(self, task_id: str, rng: random.Random, *, held_out: bool) -> TaskSpec:
        """A sum; two numbers that are held out occur in no training task and no demonstration."""
        a, b, question = _draw(rng, held_out=held_out)
        data = {"answer": str(a + b), "problem": question, "completion": careful_answer(a, b)}
        return TaskSpec(task_id, (Message("user", question),), data)


def is_held_out(a: int, b: int) -> bool:
    """Whether the ordered pair is held out."""
    digest = hashlib.blake2b(f"{a}+{b}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") < HELD_OUT_SHARE * 2**64


def careful_answer(a: int, b: int) -> str:
    """Column by column, always right: `7+5=2c 4+3=8 \\boxed{82}` for 47 and 35 (c is the carry)."""
    ones = a % 10 + b % 10
    return f"{a % 10}+{b % 10}={ones % 10}{'c' * (ones // 10)} {a // 10}+{b // 10}={(a + b) // 10} \\boxed{{{a + b}}}"


def careful_check(a: int, b: int, proposed: int) -> str:
    """The sum column by column beside what is proposed, always right: `7+5=2c:2y 4+3=8:8y approve`."""
    ones, tens = a % 10 + b % 10, (a + b) // 10
    first = (
        f"{a % 10}+{b % 10}={ones % 10}{'c' * (ones // 10)}:{proposed % 10}{'ny'[ones % 10 == proposed % 10]}"
    )
    second = f"{a // 10}+{b // 10}={tens}:{proposed // 10}{'ny'[tens == proposed // 10]}"
    return f"{first} {second} {'approve' if a + b == proposed else 'reject'}"


def demonstrations(seed: int) -> Iterator[Demonstration]:
    """The solver's: half careful, half a guess. Reinforcement learning is to tell them apart."""
    for index in count():
        rng = random.Random(f"solver/{seed}/{index}")
        a, b, question = _draw(rng, held_out=False)
        answer = careful_answer(a, b) if index % 2 else f"\\boxed{{{rng.randint(20, 99)}}}"
        yield Demonstration((Message("user", question),), answer)


def teacher_demonstrations(seed: int) -> Iterator[Demonstration]:
    """Those of the teacher of distill: careful ones only, which its student has not seen."""
    return islice(demonstrations(seed + 1_000_003), 1, None, 2)


def verifier_demonstrations(seed: int) -> Iterator[Demonstration]:
    """The verifier's, as `verifier_prompt` of math-multi-agent asks: half careful, half the toss of a coin."""
    for index in count():
        rng = random.Random(f"verifier/{seed}/{index}")
        a, b, question = _draw(rng, held_out=False)
        proposed = rng.choice(
            (a + b, a + b, min(99, a + b + rng.choice((-10, -1, 1, 10))), rng.randint(20, 99))
        )
        check = careful_check(a, b, proposed) if index % 2 else rng.choice(("approve", "reject"))
        yield Demonstration((Message("user", f"{question} Answer: {proposed}"),), check)


def planner_demonstrations(seed: int) -> Iterator[Demonstration]:
    """The planner's, as `planner_prompt` of planner-worker asks: half name the ones first, half the tens."""
    for index in count():
        a, b, question = _draw(random.Random(f"planner/{seed}/{index}"), held_out=False)
        ones, tens = careful_plan(a, b).split()
        plan = f"{ones} {tens}" if index % 2 else f"{tens} {ones}"
        yield Demonstration((Message("user", f"Plan: {question}"),), plan)


def careful_plan(a: int, b: int) -> str:
    """The columns to add: `7+5 4+3` for 47 and 35."""
    return f"{a % 10}+{b % 10} {a // 10}+{b // 10}"


def worker_demonstrations(seed: int) -> Iterator[Demonstration]:
    """The worker's, as `worker_prompt` asks: it adds up the columns of the plan, whatever the question is."""
    for index in count():
        rng = random.Random(f"worker/{seed}/{index}")
        a, b, _ = _draw(rng, held_out=False)
        answer = careful_answer(a, b) if index % 4 else f"\\boxed{{{rng.randint(20, 99)}}}"
        yield Demonstration((Message("user", careful_plan(a, b)),), answer)


def _draw(rng: random.Random, *, held_out: bool) -> tuple[int, int, str]:
    while True:
        a, b = rng.randint(10, 89), rng.randint(10, 89)
        if a + b <= 99 and is_held_out(a, b) is held_out:
            break
    text = rng.choice(TEMPLATES).format(name=rng.choice(NAMES), thing=rng.choice(THINGS), a=a, b=b)
    return a, b, text
