"""Questions that take several searches: rows of a folder, and at small size generated chains of box, key and door.

Invariant: a question belongs to one split for ever, by its row or by its box. The dataflow server reads `Questions` or
`Doors`, nodes grade with `ExactMatch`; `python recipe.py` writes the passages of the small size.
"""

import json
import random
import re
import sys
import unicodedata
from collections import Counter
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

from astraflow.data.generated_tasks import GeneratedTasks
from astraflow.data.task_files import RowTasks, read_rows
from astraflow.errors import RecipeError
from astraflow.plugins import Demonstration, Message, Score, TaskSpec

ASK = (
    "Answer the question. Think first; then either look something up with <search>query</search>, which shows passages "
    "and may be done several times, or give the answer, as short as possible, with <answer>answer</answer>.\n\n"
    "Question: "
)
BRING = (
    "give the folder that holds questions.jsonl and passages.jsonl, in the form of recipes/search/README.md: --set "
    "run.dataset.with.folder=FOLDER"
)
NUMBERS = range(10, 100)
"""Of boxes, keys and doors."""
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.S)


class Questions(RowTasks[dict[str, Any]]):
    """`questions.jsonl` of a folder: `split` (train or test), `question`, `answer`, and `support`, if it is known."""

    def __init__(self, *, seed: int, folder: Path) -> None:
        fields = {"split": str, "question": str, "answer": str}
        rows = read_rows(folder / "questions.jsonl", fields=fields, remedy=BRING)
        train, test = ([row for row in rows if row["split"] == split] for split in ("train", "test"))
        if not (train and test):
            found = ", ".join(
                f"{number} {name!r}" for name, number in Counter(row["split"] for row in rows).items()
            )
            raise RecipeError(
                f"{folder / 'questions.jsonl'} has rows of split {found}; it needs train and test"
            )
        super().__init__(train=train, heldout=test, seed=seed)

    def task(self, task_id: str, row: dict[str, Any]) -> TaskSpec:
        """The question; its answer and where it is found are for the grader and the metrics."""
        data = {"answer": row["answer"], "support": row.get("support", []), "problem": row["question"]}
        return TaskSpec(task_id, (Message("user", ASK + row["question"]),), data, source=row.get("kind", ""))


class ExactMatch:
    """1 for the answer, but for case, accents, articles and punctuation, in the last tag. Metric `f1`: of words."""

    def __call__(self, task: TaskSpec, completion: str) -> Score:
        given = _ANSWER.findall(completion)
        said, wanted = (_words(text) for text in (given[-1] if given else "", str(task.data["answer"])))
        common = (Counter(said) & Counter(wanted)).total()
        f1 = 2 * common / (len(said) + len(wanted)) if common else 0.0
        return Score(float(bool(given) and said == wanted), {"f1": f1, "answered": float(bool(given))})


def _words(text: str) -> list[str]:
    plain = "".join(
        each for each in unicodedata.normalize("NFKD", text.lower()) if not unicodedata.combining(each)
    )
    return [word for word in re.findall(r"\w+", plain) if word not in ("a", "an", "the")]


class Doors(GeneratedTasks):
    """Endless questions which door a box's key opens; called by the dataflow server at small size."""

    def task(self, task_id: str, rng: random.Random, *, held_out: bool) -> TaskSpec:
        """A box; one that is held out occurs in no training task and no demonstration."""
        box = _box(rng, held_out=held_out)
        key = key_of(box)
        data = {"answer": f"door{door_of(key)}", "support": [f"box{box}", f"key{key}"]}
        return TaskSpec(task_id, (Message("user", f"box{box}?"),), data)


def key_of(box: int) -> int:
    """The key in a box."""
    return NUMBERS[(37 * NUMBERS.index(box) + 11) % len(NUMBERS)]


def door_of(key: int) -> int:
    """The door that a key opens."""
    return NUMBERS[(53 * NUMBERS.index(key) + 29) % len(NUMBERS)]


def passages() -> Iterator[dict[str, str]]:
    """What the search service of the small size holds."""
    for box in NUMBERS:
        key = key_of(box)
        yield {"doc_id": f"box{box}", "title": f"box{box}", "text": f"inside lies key{key}"}
        yield {"doc_id": f"key{key}", "title": f"key{key}", "text": f"opens door{door_of(key)}"}


def demonstrations(seed: int) -> Iterator[Demonstration]:
    """One turn of an episode each: all search until they can answer, but a quarter, which guess at once."""
    for index in count():
        rng = random.Random(f"demonstration/{seed}/{index}")
        box = _box(rng, held_out=False)
        key, door = key_of(box), door_of(key_of(box))
        said = [f"<search>box{box}</search>", f"<search>key{key}</search>", f"<answer>door{door}</answer>"]
        shown = [f"box{box}?", f"box{box}: inside lies key{key}", f"key{key}: opens door{door}"]
        turn = index % 4
        chat = [Message("user", shown[0])]
        for before in range(turn % 3):
            chat += [Message("assistant", said[before]), Message("user", shown[before + 1])]
        guess = f"<answer>door{rng.choice(NUMBERS)}</answer>"
        yield Demonstration(tuple(chat), guess if turn == 3 else said[turn])


def _box(rng: random.Random, *, held_out: bool) -> int:
    return rng.choice([box for box in NUMBERS if (box % 9 == 0) is held_out])


if __name__ == "__main__":
    sys.stdout.writelines(json.dumps(passage) + "\n" for passage in passages())
