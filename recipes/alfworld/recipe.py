"""ALFWorld's games from a folder, and at small size generated household tasks of the same shape.

Invariant: a game belongs to the split whose folder or file it lies in, a generated pair of object and target to one for
ever. The dataflow server reads `Games` or `Chores`; nodes act in a served AlfWorld, at small size in `Household`.
"""

import random
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path

from astraflow.data.task_files import RowTasks, read_rows
from astraflow.errors import RecipeError
from astraflow.plugins import Demonstration, Message, Observation, TaskSpec

ACT = (
    "You act in a household by text. Each turn, think, then write one command alone on the last line: one of those "
    "that are listed."
)
FETCH = (
    "pip install 'astraflow[alfworld]' and alfworld-download bring the games to ~/.cache/alfworld/json_2.1.1; give the "
    "folder: --set run.dataset.with.folder=FOLDER"
)
PLACES = ("bed", "desk", "shelf")
TARGETS = ("bin", "box", "sink")
THINGS = ("mug", "book", "cup", "key", "pen", "soap")
_PAIRS = [(thing, target) for thing in THINGS for target in TARGETS]
_COMMAND = re.compile(r"(?:go to (\w+) 1|take (\w+) 1 from (\w+) 1|move (\w+) 1 to (\w+) 1)")


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
        found = sorted(str(path.relative_to(folder)) for path in (folder / split).glob("**/game.tw-pddl"))
        if not found:
            raise RecipeError(f"{folder / split} has no game.tw-pddl below it: {FETCH}")
        return found
    fields = {"id": str, "task": str, "pddl_problem": str}
    return [row["id"] for row in read_rows(folder / f"{split}.jsonl", fields=fields, remedy=FETCH)]


def _type_of(game: str) -> str:
    """`pick_heat_then_place_in_recep` of a name such as `train/pick_heat_then_place_in_recep-Egg-…/trial_…`."""
    return next((part.partition("-")[0] for part in game.split("/") if "-" in part), "")


class Household:
    """The environment of the small size: a thing lies in one of three places, and is wanted in another."""

    def __init__(self) -> None:
        self._room = Room((), {}, "", "")

    async def reset(self, task: TaskSpec) -> Observation:
        """Enter the room of the task."""
        self._room = Room(PLACES, task.data["lies"], task.data["thing"], task.data["target"])
        return Observation(messages=(Message("user", self._room.intro),))

    async def step(self, action: Message) -> Observation:
        """Carry out the command on the last line."""
        seen = self._room.act((action.content.strip().splitlines() or [""])[-1].strip())
        won = float(self._room.is_done)
        return Observation(
            messages=(Message("user", seen),), reward=won, done=bool(won), metrics={"won": won}
        )

    async def close(self) -> None:
        """Nothing is held."""


class Room:
    """What lies where, and where the agent is; in the words of ALFWorld, but fewer of them."""

    def __init__(self, places: Sequence[str], lies: Mapping[str, str], thing: str, target: str) -> None:
        """`lies` is where each thing is."""
        self.places, self.thing, self.target = [*places, target], thing, target
        self.lies = dict(lies)
        self._at = ""

    @property
    def intro(self) -> str:
        """What is seen first."""
        seen = ", ".join(f"a {place} 1" for place in self.places)
        return f"You see {seen}. Your task is to: put a {self.thing} in {self.target} 1."

    @property
    def is_done(self) -> bool:
        """Whether the thing is where it is wanted."""
        return self.lies.get(self.thing) == self.target

    def act(self, command: str) -> str:
        """Return what is seen after a command; what cannot be done changes nothing."""
        said = _COMMAND.fullmatch(command)
        place, taken, taken_from, moved, moved_to = said.groups() if said else [None] * 5
        if place in self.places:
            self._at = place
            lying = [f"a {thing} 1" for thing, where in self.lies.items() if where == place]
            return f"On the {place} 1, you see {', and '.join(lying) or 'nothing'}."
        if taken and self.lies.get(taken) == taken_from == self._at:
            self.lies[taken] = "hand"
            return f"You pick up the {taken} 1 from the {self._at} 1."
        if moved and self.lies.get(moved) == "hand" and moved_to == self._at:
            self.lies[moved] = moved_to
            return f"You move the {moved} 1 to the {moved_to} 1."
        return "Nothing happens."


def expert(room: Room, visited: Sequence[str]) -> str:
    """What somebody does who looks everywhere in turn; `visited` are the places so far."""
    where, at = room.lies[room.thing], visited[-1] if visited else ""
    if where == "hand":
        wanted = room.target
        return f"move {room.thing} 1 to {wanted} 1" if at == wanted else f"go to {wanted} 1"
    if where == at:
        return f"take {room.thing} 1 from {at} 1"
    return f"go to {next(place for place in room.places if place not in visited)} 1"


class Chores:
    """Endless household tasks; called by the dataflow server at small size."""

    def __init__(self, *, seed: int) -> None:
        self._seed = seed

    def train(self, index: int) -> TaskSpec:
        """Training task `index`."""
        return _task(f"train-{index}", f"train/{self._seed}/{index}", held_out=False)

    def heldout(self, index: int) -> TaskSpec:
        """Held-out task `index`; its pair of thing and target occurs in no training task and no demonstration."""
        return _task(f"heldout-{index}", f"heldout/{self._seed}/{index}", held_out=True)


def _task(task_id: str, key: str, *, held_out: bool) -> TaskSpec:
    rng = random.Random(key)
    thing, target = rng.choice([pair for place, pair in enumerate(_PAIRS) if (place % 4 == 0) is held_out])
    others = rng.sample([each for each in THINGS if each != thing], 2)
    lies = dict(zip(rng.sample([thing, *others], 3), PLACES, strict=True))
    data = {"thing": thing, "target": target, "lies": lies, "problem": f"{thing} {target}"}
    return TaskSpec(task_id, (), data)


def demonstrations(seed: int) -> Iterator[Demonstration]:
    """One turn each; half of the walks are an expert's, half lead anywhere."""
    for index in count():
        rng = random.Random(f"demonstration/{seed}/{index}")
        data = _task("", f"demonstrated/{seed}/{index}", held_out=False).data
        room, visited = Room(PLACES, data["lies"], data["thing"], data["target"]), list[str]()
        chat, turns = [Message("user", room.intro)], rng.randrange(6)
        for turn in range(turns + 1):
            said = expert(room, visited)
            if said.startswith("go") and rng.random() < 0.5:
                said = f"go to {rng.choice(room.places)} 1"
            if turn == turns or room.is_done:
                break
            if said.startswith("go"):
                visited.append(said.split()[2])
            chat += [Message("assistant", said), Message("user", room.act(said))]
        if not room.is_done:
            yield Demonstration(tuple(chat), said)
