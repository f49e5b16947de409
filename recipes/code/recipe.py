"""MBPP and HumanEval from folders, and at small size generated programs of one line in the stdin and stdout format.

Invariant: MBPP's splits are those of its paper, HumanEval is never trained on, and a generated problem belongs to one
split by its two numbers. The dataflow server reads the data sets, trainers' warm starts the demonstrations; the
sandbox that grades is the same for all formats.
"""

import random
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

from astraflow.data.generated_tasks import GeneratedTasks
from astraflow.data.task_files import RowTasks, read_rows
from astraflow.plugins import Demonstration, Message, TaskSpec

GITHUB = "https://raw.githubusercontent.com"
FETCH_MBPP = (
    f"curl -L --create-dirs -o data/mbpp/mbpp.jsonl {GITHUB}/google-research/google-research/master/mbpp/mbpp.jsonl, "
    "or name the file: --set run.sources.mbpp.dataset.with.file=FILE"
)
FETCH_HUMANEVAL = (
    "git clone https://github.com/openai/human-eval data/human-eval, or name the file: "
    "--set run.sources.humaneval.dataset.with.file=FILE"
)
TRAIN, TEST = range(601, 975), range(11, 511)
"""Numbers of MBPP's tasks, by its paper."""
CASES = (2, 7)


class Mbpp(RowTasks[dict[str, Any]]):
    """MBPP, whole or sanitized, as JSON lines."""

    def __init__(self, *, seed: int, file: Path) -> None:
        fields = {"task_id": int, "prompt|text": str, "tests|test_list": list, "reference|code": str}
        rows = read_rows(file, fields=fields, remedy=FETCH_MBPP)
        train, test = ([row for row in rows if row["task_id"] in split] for split in (TRAIN, TEST))
        super().__init__(train=train, heldout=test, seed=seed)

    def task(self, task_id: str, row: dict[str, Any]) -> TaskSpec:
        """The text and its first test, which says how the function is called; all tests grade."""
        tests = row["tests"]
        ask = f"{row['prompt']}\nIt must pass tests like this one:\n{tests[0]}\nAnswer with one ```python block."
        keys = ("test_imports", "test_setup_code")
        data = {"test_list": tests, "reference": row["reference"], "problem": str(row["task_id"])}
        data |= {"statement": row["prompt"], **{key: row[key] for key in keys if row.get(key)}}
        return TaskSpec(task_id, (Message("user", ask),), data)


class HumanEval(RowTasks[dict[str, Any]]):
    """HumanEval, held out only."""

    def __init__(self, *, seed: int, file: Path) -> None:
        fields = {"prompt": str, "entry_point": str, "test": str, "reference|canonical_solution": str}
        super().__init__(train=(), heldout=read_rows(file, fields=fields, remedy=FETCH_HUMANEVAL), seed=seed)

    def task(self, task_id: str, row: dict[str, Any]) -> TaskSpec:
        """The function to complete."""
        ask = f"Complete this function, and answer with all of it in one ```python block.\n\n{row['prompt']}"
        data = {key: row[key] for key in ("prompt", "entry_point", "test", "reference")}
        return TaskSpec(task_id, (Message("user", ask),), data)


class Lines(GeneratedTasks):
    """Endless problems such as `Times 3, plus 41.`: a program reads a number and prints another."""

    def task(self, task_id: str, rng: random.Random, *, held_out: bool) -> TaskSpec:
        """Two numbers; those that are held out occur in no training task and no demonstration."""
        times, plus = _draw(rng, held_out=held_out)
        cases = [{"stdin": f"{x}\n", "stdout": f"{times * x + plus}\n"} for x in CASES]
        data = {"stdio": cases, "reference": program(times, plus)}
        return TaskSpec(task_id, (Message("user", question(times, plus)),), data)


def question(times: int, plus: int) -> str:
    """What is asked."""
    return f"Times {times}, plus {plus}."


def program(times: int, plus: int) -> str:
    """What does it."""
    return f"print({times}*int(input())+{plus})"


def demonstrations(seed: int) -> Iterator[Demonstration]:
    """The solver's: half do what is asked, half take one number for the other."""
    for index in count():
        rng = random.Random(f"solver/{seed}/{index}")
        times, plus = _draw(rng, held_out=False)
        written = program(times, plus) if index % 2 else program(plus, times)
        yield Demonstration((Message("user", question(times, plus)),), written)


def selector_demonstrations(seed: int) -> Iterator[Demonstration]:
    """The selector's, as `selector_prompt` of code-multi-agent asks: half compare, half toss a coin."""
    for index in count():
        rng = random.Random(f"selector/{seed}/{index}")
        times, plus = _draw(rng, held_out=False)
        right = rng.choice("AB")
        shown = {name: program(times, plus) if name == right else program(plus, times) for name in "AB"}
        asked = f"{question(times, plus)} A: {shown['A']} B: {shown['B']}"
        yield Demonstration((Message("user", asked),), right if index % 2 else rng.choice("AB"))


def tester_demonstrations(seed: int) -> Iterator[Demonstration]:
    """The tester's, as `tester_prompt` asks: two cases, half of them with a wrong output."""
    for index in count():
        rng = random.Random(f"tester/{seed}/{index}")
        times, plus = _draw(rng, held_out=False)
        slip = 0 if index % 2 else rng.randint(1, 9)
        cases = "".join(f"Input: {x} Output: {times * x + plus + slip}\n" for x in (0, 1))
        yield Demonstration((Message("user", f"Tests: {question(times, plus)}"),), cases)


def _draw(rng: random.Random, *, held_out: bool) -> tuple[int, int]:
    while True:
        times, plus = rng.randint(2, 9), rng.randint(10, 99)
        if ((7 * times + plus) % 9 == 0) is held_out:
            return times, plus
