"""What an agent is asked to buy, and demonstrations of buyers of whom half are hasty.

Invariant: a goal belongs to one split for ever. The dataflow server reads `Goals`, the environment service serves
`Shop`, the warm start of the small size reads `demonstrations`.
"""

import random
from collections.abc import Iterator
from itertools import count
from pathlib import Path

from astraflow.data.task_files import RowTasks
from astraflow.plugins import Demonstration, Message, TaskSpec

from .catalogue import Goal, Product, reward  # noqa: TID252 - files beside this one
from .shop import Shop, index_of  # noqa: TID252
from .webshop import catalogue, goals  # noqa: TID252

__all__ = ["Goals", "Product", "Shop", "catalogue", "demonstrations", "goals", "index_of", "reward"]

RULES = (
    "You shop. Think, then end each turn with one action: search[words], or click[what is shown], which is the id of a "
    "product, one of its options, next, prev, description, or buy now, which ends.\n\nInstruction: "
)


class Goals(RowTasks[Goal]):
    """What customers want, of a WebShop `folder` or generated; the environment has the same settings."""

    def __init__(self, *, seed: int, folder: Path | None = None, small: bool = False) -> None:
        found = goals(folder, small=small)
        super().__init__(
            train=[each for each in found if not each.is_held_out],
            heldout=[each for each in found if each.is_held_out],
            seed=seed,
        )
        self._rules = "" if small else RULES

    def task(self, task_id: str, row: Goal) -> TaskSpec:
        """The instruction; what is wanted is for the environment."""
        wanted = {"attributes": row.attributes, "options": row.options, "price_upper": row.price_upper}
        data = {"product": row.product_id, "goal": wanted, "problem": row.instruction}
        return TaskSpec(task_id, (Message("user", self._rules + row.instruction),), data)


def demonstrations(seed: int) -> Iterator[Demonstration]:
    """One turn each, at small size. Half of the searches forget the attribute, half of the buyers choose no colour."""
    tasks, shop = Goals(seed=seed, small=True), Shop(small=True, page_size=1)
    for index in count():
        rng = random.Random(f"demonstration/{seed}/{index}")
        task = tasks.train(index)
        assert task is not None
        yield _turn_of_an_episode(rng, task, shop, turn=index % 4)


def _turn_of_an_episode(rng: random.Random, task: TaskSpec, shop: Shop, *, turn: int) -> Demonstration:
    chat, is_hasty = list(task.messages), False
    shop._task = task
    wanted = task.data["problem"].partition(",")[0]
    for place in range(turn + 1):
        is_hasty = rng.random() < 0.5
        if place == 0:
            said = f"search[{wanted.split()[1] if is_hasty else wanted}]"
        elif place == 1:
            said = f"click[{shop._found[0].product_id}]"
        elif place == 2:
            said = "click[buy now]" if is_hasty and turn == 2 else f"click[{task.data['goal']['options'][0]}]"
        else:
            said = "click[buy now]"
        if place == turn:
            return Demonstration(tuple(chat), said)
        chat += [Message("assistant", said), *shop.act(said).messages]
    raise AssertionError("a turn ends the loop")
