"""A shop in which an agent searches, clicks and buys, and what it is asked to buy.

Invariant: whoever shops sees only what was searched for and clicked; the reward is that of what was bought, 0 for who
buys nothing. The dataflow server reads `Goals`, the environment service serves `Shop`, the warm start of the small size
reads `demonstrations`.
"""

import random
import re
from collections.abc import Iterator
from functools import cache, lru_cache
from itertools import count
from pathlib import Path
from typing import Any

from astraflow.data.task_files import RowTasks
from astraflow.errors import RecipeError
from astraflow.plugins import Demonstration, Message, MissingCapability, Observation, TaskSpec

from .catalogue import Goal, Product, catalogue, goals, reward  # noqa: TID252 - the file beside this one

__all__ = ["Goals", "Shop", "demonstrations"]

RULES = (
    "You shop. Think, then end each turn with one action: search[words], or click[what is shown], which is the id of a "
    "product, one of its options, next, prev, description, or buy now, which ends.\n\nInstruction: "
)
_ACTION = re.compile(r"(search|click)\[([^\[\]]*)\]", re.I)
_HINT = "Nothing happened: search[words], or click[what is shown]."


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


class Shop:
    """The environment: pages of results, pages of products, options that are chosen, and a purchase that ends it.

    Metrics: `bought`, and of what was bought `type`, `attributes`, `options` and `price`, as the reward is made of.
    """

    def __init__(
        self,
        *,
        folder: Path | None = None,
        small: bool = False,
        page_size: int = 10,
        max_results: int = 50,
    ) -> None:
        self._products, self._search = catalogue(folder, small=small), search(folder, small=small)
        self._page_size, self._max_results = page_size, max_results
        self._task = TaskSpec("", ())
        self._found: list[Product] = []
        self._first, self._open = 0, ""
        self._chosen: dict[str, str] = {}

    async def reset(self, task: TaskSpec) -> Observation:
        """Show nothing: the task says what is wanted. Raises MissingCapability for another shop's task."""
        if task.data["product"] not in self._products:
            raise MissingCapability(
                f"this shop has no product {task.data['product']!r} among its {len(self._products)}; serve it with the "
                "`folder` and `small` of run.dataset"
            )
        self._task, self._found, self._first, self._open, self._chosen = task, [], 0, "", {}
        return Observation()

    async def step(self, action: Message) -> Observation:
        """Carry out the last action of the answer."""
        return self.act(action.content)

    async def close(self) -> None:
        """Nothing is held."""

    def act(self, said: str) -> Observation:
        """What `step` does."""
        actions = _ACTION.findall(said)
        kind, text = (actions[-1][0].lower(), actions[-1][1].strip().lower()) if actions else ("", "")
        if kind == "click" and text == "buy now" and self._open:
            return self._buy()
        shown = self._look_for(text) if kind == "search" else self._click(text) if kind == "click" else _HINT
        return Observation(messages=(Message("user", shown),), metrics={"bought": 0.0})

    def _look_for(self, words: str) -> str:
        self._found = [self._products[found] for found in self._search(words, self._max_results)]
        self._first, self._open, self._chosen = 0, "", {}
        return self._results()

    def _results(self) -> str:
        page = self._found[self._first : self._first + self._page_size]
        lines = [f"{each.product_id} {each.title} ${each.price:g}" for each in page]
        return "\n".join(lines) or "Nothing was found."

    def _click(self, text: str) -> str:
        if self._open:
            return self._click_on_product(self._products[self._open], text)
        page = [each.product_id for each in self._found[self._first : self._first + self._page_size]]
        if text in page:
            self._open = text
            return _product_page(self._products[text])
        step = {"next": self._page_size, "prev": -self._page_size}.get(text, 0)
        if not step or not 0 <= self._first + step < len(self._found):
            return _HINT
        self._first += step
        return self._results()

    def _click_on_product(self, product: Product, text: str) -> str:
        if text == "prev":
            self._open, self._chosen = "", {}
            return self._results()
        if text == "description":
            return f"{product.text}\nAttributes: {', '.join(product.attributes)}"
        name = next((name for name, values in product.options.items() if text in values), None)
        if name is None:
            return _HINT
        self._chosen[name] = text
        return f"{name}: {text}"

    def _buy(self) -> Observation:
        wanted = self._products[self._task.data["product"]]
        parts = reward(
            self._products[self._open],
            wanted=wanted,
            goal=self._task.data["goal"],
            chosen=list(self._chosen.values()),
        )
        earned = parts.pop("reward")
        return Observation(reward=earned, done=True, metrics={"bought": 1.0, **parts})


def _product_page(product: Product) -> str:
    options = [f"{name}: {', '.join(values)}" for name, values in product.options.items()]
    return "\n".join([f"{product.title} ${product.price:g}", *options])


@cache
def search(folder: Path | None, *, small: bool) -> Any:  # noqa: ANN401 - a cached function
    """BM25 over titles, attributes and texts: takes words and how many, returns product ids, the best first.

    Raises RecipeError where the package for it is missing.
    """
    products = catalogue(folder, small=small).values()
    try:
        from astraflow_environment.adapters.search_service import PassageIndex

        index = PassageIndex(
            [
                {
                    "doc_id": each.product_id,
                    "title": each.title,
                    "text": f"{' '.join(each.attributes)} {each.text}",
                }
                for each in products
            ]
        )
    except ModuleNotFoundError as error:
        raise RecipeError(f"{error.name} is missing; pip install 'astraflow[environment,search]'") from error
    return lru_cache(maxsize=4096)(
        lambda words, top_k: [each["doc_id"] for each in index.search(words, top_k=top_k)]
    )


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
