"""ALFWorld's games from a folder, and at small size generated household tasks of the same shape.

Invariant: a game belongs to the split whose folder or file it lies in, a generated pair of thing and target to one for
ever. The dataflow server reads `Games` or `Chores`; nodes act in a served AlfWorld, at small size in `Household`.
"""

import random
import re
from collections.abc import Iterator
from itertools import count, product
from pathlib import Path

from astraflow.data.generated_tasks import GeneratedTasks
from astraflow.data.task_files import RowTasks, read_rows
from astraflow.errors import RecipeError
from astraflow.plugins import Demonstration, Message, TaskSpec

from .household import PLACES, Household, Room, expert  # noqa: TID252 - the file beside this one

__all__ = ["Chores", "Games", "Household", "Room", "demonstrations", "expert"]

ACT = (
    "You act in a household by text. Each turn, think, then write one command alone on the last line: one of those "
    "that are listed."
)
FETCH = (
    "pip install 'astraflow[alfworld]' and alfworld-download bring the games to ~/.cache/alfworld/json_2.1.1; give the "
    "folder: --set run.dataset.with.folder=FOLDER"
)
TARGETS = ("bin", "box", "sink")
THINGS = ("mug", "book", "cup", "key", "pen", "soap")
_SOLVABLE = re.compile(rb'"solvable":\s*true')
_HOUSEHOLDS = list(product(THINGS, PLACES, TARGETS))
"""Of each the thing, where it lies, and where it is wanted; every fourth is held out."""


class Games(RowTasks[str]):
    """Games by split: folders of `game.tw-pddl` as `alfworld-download` makes them, or JSON lines with their `id`."""

    def __init__(
        self, *, seed: int, folder: Path, train: str = "train", heldout: str = "valid_unseen"
    ) -> None:
        super().__init__(train=_games(folder, train), heldout=_games(folder, heldout), seed=seed)

    def task(self, task_id: str, row: str) -> TaskSpec:
        """The game by its name; the environment says what is to be done. The source is the type of task."""
        return TaskSpec(task_id, (Message("user", ACT),), {"game": row}, source=_type_of(row))


def _games(folder: Path, split: str) -> list[str]:
    if (folder / split).is_dir():
        paths = sorted((folder / split).glob("**/game.tw-pddl"))
        found = [str(path.relative_to(folder)) for path in paths if _is_played(path, below=folder)]
        if not found:
            raise RecipeError(
                f"{folder / split} has {len(paths)} game.tw-pddl below it, none of them solvable: {FETCH}"
            )
        return found
    fields = {"id": str, "task": str, "pddl_problem": str}
    return [row["id"] for row in read_rows(folder / f"{split}.jsonl", fields=fields, remedy=FETCH)]


def _is_played(game: Path, *, below: Path) -> bool:
    """Whether the package plays it: only what is solvable, and neither movable receptacles nor slices."""
    name = game.relative_to(below).as_posix()
    return not re.search("movable|Sliced", name) and bool(_SOLVABLE.search(game.read_bytes()))


def _type_of(game: str) -> str:
    """`pick_heat_then_place_in_recep` of a name such as `train/pick_heat_then_place_in_recep-Egg-…/trial_…`."""
    return next((part.partition("-")[0] for part in game.split("/") if "-" in part), "")


class Chores(GeneratedTasks):
    """Endless household tasks; called by the dataflow server at small size."""

    def task(self, task_id: str, rng: random.Random, *, held_out: bool) -> TaskSpec:
        """A household; one that is held out occurs in no training task and no demonstration."""
        found = [each for number, each in enumerate(_HOUSEHOLDS) if (number % 4 == 0) is held_out]
        thing, place, target = rng.choice(found)
        problem = f"{thing} from {place} to {target}"
        data = {"thing": thing, "target": target, "lies": {thing: place}, "problem": problem}
        return TaskSpec(task_id, (), data)


def demonstrations(seed: int) -> Iterator[Demonstration]:
    """One turn each; a third of the steps leads anywhere, the others are an expert's."""
    chores = Chores(seed=seed)
    for index in count():
        rng = random.Random(f"demonstration/{seed}/{index}")
        data = chores.task("", random.Random(f"demonstrated/{seed}/{index}"), held_out=False).data
        room, visited = Room(PLACES, data["lies"], data["thing"], data["target"]), list[str]()
        chat, turns = [Message("user", room.intro)], rng.randrange(6)
        for turn in range(turns + 1):
            said = expert(room, visited)
            if said.startswith("go") and rng.random() < 0.35:
                said = f"go to {rng.choice(room.places)} 1"
            if turn == turns or room.is_done:
                break
            if said.startswith("go"):
                visited.append(said.split()[2])
            chat += [Message("assistant", said), Message("user", room.act(said))]
        if not room.is_done:
            yield Demonstration(tuple(chat), said)
