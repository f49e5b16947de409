"""Tasks of our own for the small size: a number stands in one file and is to be written to another.

Invariant: a task has the files of a folder in Harbor's layout, and belongs to one split by the names that it has. The
dataflow server reads `Copies`, the trainer's warm start `demonstrations`; `FolderTasks` reads a user's own folder.
"""

import hashlib
import random
from collections.abc import Iterator, Mapping
from itertools import count

from astraflow.data.generated_tasks import GeneratedTasks
from astraflow.data.task_folders import FolderTasks
from astraflow.plugins import Demonstration, Message, TaskSpec

__all__ = ["Copies", "FolderTasks", "demonstrations"]

NAMES = ("ant", "bee", "cat", "cow", "dog", "elk", "fly", "fox", "hen", "owl", "pig", "ram")
SETTINGS = "[agent]\ntimeout_sec = 60.0\n\n[verifier]\ntimeout_sec = 10.0\n"
TEST = """#!/bin/bash
if [ "$(cat {target})" = {number} ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
"""


class Copies(GeneratedTasks):
    """Endless tasks such as `Copy ant to bee.`, where ant holds a number."""

    def task(self, task_id: str, rng: random.Random, *, held_out: bool) -> TaskSpec:
        """Two names; those that are held out come together in no training task and no demonstration."""
        source, target, number = _draw(rng, held_out=held_out)
        asked = (Message("user", instruction(source, target)),)
        return TaskSpec(task_id, asked, {"task": task_id, "files": folder(source, target, number)})


def instruction(source: str, target: str) -> str:
    """What is asked."""
    return f"Copy {source} to {target}."


def folder(source: str, target: str, number: int) -> Mapping[str, str]:
    """The files of the task's folder."""
    return {
        "task.toml": SETTINGS,
        "instruction.md": instruction(source, target) + "\n",
        "environment/Dockerfile": f"FROM debian\nWORKDIR /app\nCOPY {source} ./\n",
        f"environment/{source}": f"{number}\n",
        "tests/test.sh": TEST.format(target=target, number=number),
        "solution/solve.sh": f"cat {source}\necho {number} > {target}\n",
    }


def demonstrations(seed: int) -> Iterator[Demonstration]:
    """One command each. Of those that begin an episode half look first, half guess the number; most copy what is shown,
    which is what takes long to learn.
    """
    for index in count():
        rng = random.Random(f"demonstration/{seed}/{index}")
        source, target, number = _draw(rng, held_out=False)
        guess = f"echo {rng.randint(10, 99)} > {target}"
        looked = (f"cat {source}", str(number)), (f"echo {number} > {target}", "(no output)")
        guessed = ((guess, "(no output)"),)
        before, said = rng.choice(
            [
                ((), looked[0][0]),
                ((), guess),
                *[(looked[:1], looked[1][0])] * 6,
                (looked, "exit"),
                (guessed, "exit"),
            ]
        )
        chat = [Message("user", instruction(source, target))]
        for command, shown in before:
            chat += [Message("assistant", command), Message("user", shown)]
        yield Demonstration(tuple(chat), said)


def _draw(rng: random.Random, *, held_out: bool) -> tuple[str, str, int]:
    while True:
        source, target = rng.sample(NAMES, 2)
        digest = hashlib.blake2b(f"{source} {target}".encode(), digest_size=1).digest()[0]
        if (digest < 26) is held_out:
            return source, target, rng.randint(10, 99)
