"""A household in the words of ALFWorld, but fewer of them, and an expert who knows how to look for things.

Invariant: what cannot be done changes nothing, and says so. Nodes act in `Household` at the small size; demonstrations
play its rooms.
"""

import re
from collections.abc import Mapping, Sequence

from astraflow.plugins import Message, Observation, TaskSpec

PLACES = ("bed", "desk", "shelf")
_COMMAND = re.compile(r"(?:go to (\w+) 1|take (\w+) 1 from (\w+) 1|move (\w+) 1 to (\w+) 1)")


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

    def _possible(self, place: str) -> str:
        """What can be done here, as the games list it."""
        found = [f"take {thing} 1 from {place} 1" for thing, where in self.lies.items() if where == place]
        found += [f"move {thing} 1 to {place} 1" for thing, where in self.lies.items() if where == "hand"]
        return f" You can {', '.join(found)}." if found else ""

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
            return f"On the {place} 1, you see {', and '.join(lying) or 'nothing'}." + self._possible(place)
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
