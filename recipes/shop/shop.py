"""A shop in which an agent searches, clicks and buys.

Invariant: whoever shops sees only what was searched for and clicked; the reward is that of what was bought, 0 for who
buys nothing. Served by the environment service as `recipe:Shop`; demonstrations play it too.
"""

import re
from functools import cache
from pathlib import Path

from astraflow.plugins import Message, MissingCapability, Observation, TaskSpec

from .bm25 import Bm25  # noqa: TID252 - files beside this one
from .catalogue import Product, reward  # noqa: TID252
from .webshop import catalogue  # noqa: TID252

_ACTION = re.compile(r"(search|click)\[([^\[\]]*)\]", re.I)
_HINT = "Nothing happened: search[words], or click[what is shown]."


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
        self._products, self._index = catalogue(folder, small=small), index_of(folder, small=small)
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
        self._found = [self._products[found] for found in self._index.search(words, top_k=self._max_results)]
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
def index_of(folder: Path | None, *, small: bool) -> Bm25:
    """The index over titles, attributes and texts of a catalogue."""
    products = catalogue(folder, small=small)
    return Bm25(
        {name: f"{each.title} {' '.join(each.attributes)} {each.text}" for name, each in products.items()}
    )
