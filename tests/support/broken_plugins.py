"""Plug-ins that raise, named in the recipes of `tests/integration/test_bad_plugins.py`."""

import sys

from astraflow.plugins import Group, MeasuredStep, TaskSpec, TrainedTokens
from support.dataflow_world import Counting


class Data(Counting):
    """A data set that cannot be read from its third task on, until `mended`."""

    mended = False

    def train(self, index: int) -> TaskSpec | None:
        """Two tasks, then the fault."""
        if index >= 2 and not Data.mended:
            raise OSError("the disk with the tasks is gone")
        return super().train(index)


class Repeats(Counting):
    """A data set whose tasks have one id."""

    def train(self, index: int) -> TaskSpec | None:
        """The first task, whatever is asked for."""
        return super().train(0)


class Filter:
    """A filter that raises for every group."""

    def __call__(self, group: Group) -> bool:
        """Never answers."""
        raise ZeroDivisionError("no reward was above zero")


class Reward:
    """A reward that raises for every completion."""

    def __call__(self, task: object, completion: str) -> float:
        """Never answers."""
        raise KeyError("answer")


class NotANumber:
    """A reward that is no number."""

    def __call__(self, task: object, completion: str) -> float:
        """Not finite."""
        return float("nan")


class Workflow:
    """A workflow that raises before its first token."""

    def __init__(self, reward: object) -> None:
        self.reward = reward

    async def run(self, task: object, policies: object) -> object:
        """Never answers."""
        raise RuntimeError("the game server said no")


class Exits(Workflow):
    """A workflow that ends its process, as a script would."""

    async def run(self, task: object, policies: object) -> object:
        """Never answers."""
        sys.exit("no game server")


class Unmakeable:
    """A plug-in that cannot be made."""

    def __init__(self, seed: int) -> None:
        raise RuntimeError("no licence for the data")

    def train(self, index: int) -> object:
        """Never asked."""

    def heldout(self, index: int) -> object:
        """Never asked."""


class Curator:
    """A curator that raises for every draw and every group."""

    def propose(self, tasks: object) -> object:
        """Never answers."""
        raise LookupError("no table of difficulties")

    def observe(self, group: Group) -> None:
        """Never learns."""
        raise LookupError("no table of difficulties")


class Selector:
    """A selector that chooses groups nobody has."""

    def select(self, candidates: object, request: object) -> object:
        """Never right."""
        return ["t9/solver", "t9/solver"]


class Loss:
    """A loss that raises for every micro-batch."""

    def __call__(self, tokens: TrainedTokens) -> object:
        """Never answers."""
        raise IndexError("no such token")


class ParticularLoss:
    """A loss that raises for what an engine found very unlikely, and else does its work."""

    def __call__(self, tokens: TrainedTokens) -> object:
        """REINFORCE, or the fault."""
        if float(tokens.behavior_logprob.min()) < -6.5:
            raise ValueError("too unlikely")
        return -tokens.advantage * tokens.logprob


class Measuring:
    """A filter that keeps every group and cannot learn."""

    def __call__(self, group: Group) -> bool:
        """Keep it."""
        return True

    def measured(self, step: MeasuredStep) -> None:
        """Fail."""
        raise LookupError("no such step")
