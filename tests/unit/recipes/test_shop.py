"""The recipe of the shop: what a purchase earns, pages that show only what was asked for, WebShop's files."""

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from astraflow.errors import PluginError, RecipeError
from astraflow.plugins import Message, MissingCapability, TaskSpec
from support.environments import served_environment
from support.recipes import played, recipe_code
from support.source_tree import REPOSITORY

recipe = recipe_code("shop")
shelf = recipe.catalogue


def product(title: str, **differing: Any) -> Any:
    """A soft red mug for 20, but for what differs."""
    mug = {
        "product_id": "p1",
        "title": title,
        "kind": "mug",
        "categories": frozenset({"kitchen", "tableware"}),
        "attributes": ("soft",),
        "options": {"color": ("red", "blue"), "size": ("small", "large")},
        "price": 20.0,
        "text": "For tea.",
    }
    return recipe.Product(**(mug | differing))


GOAL = {"attributes": ("soft", "For Tea"), "options": ("red", "small"), "price_upper": 30.0}


@pytest.mark.parametrize(
    ("bought", "chosen", "earned"),
    [
        (product("Fir soft mug"), ["red", "small"], 1.0),
        (product("Fir soft mug"), ["red"], 4 / 5),
        (product("Fir soft mug", price=30.0), ["blue", "small"], 4 / 5),
        (product("Fir soft mug", price=30.01), [], 2 / 5),
        (product("Fir hard mug", attributes=(), text=""), [], 1 / 5),
        # Nothing of the title is shared: 0. Little, and neither kind nor categories: a tenth, or half.
        (product("Elm soft pan"), ["red", "small"], 0.0),
        (product("Fir pan", kind="pan", categories=frozenset({"kitchen"})), ["red", "small"], 1.0),
    ],
)
def test_a_purchase_earns_the_share_of_what_was_wanted_times_how_alike_the_kind_is(
    bought: Any, chosen: list[str], earned: float
) -> None:
    parts = recipe.reward(bought, wanted=product("Fir soft mug"), goal=GOAL, chosen=chosen)
    assert parts["reward"] == pytest.approx(earned)


@pytest.mark.parametrize(("num_words", "factor"), [(4, 1.0), (6, 0.5), (12, 0.1)])
def test_of_another_kind_the_less_the_titles_share_the_less_is_earned(num_words: int, factor: float) -> None:
    wanted = product(" ".join(f"word{number}" for number in range(num_words)))
    bought = product("word0", kind="pan", categories=frozenset({"kitchen"}))
    parts = recipe.reward(bought, wanted=wanted, goal=GOAL, chosen=["red", "small"])
    assert (parts["type"], parts["reward"]) == (factor, factor)


async def test_a_scripted_customer_of_the_large_size_buys_through_the_service(tmp_path: Path) -> None:
    options = ("--recipe", str(REPOSITORY / "recipes" / "shop"))
    async with (
        served_environment(tmp_path, *options, use="recipe:Shop") as service,
        played("shop", scratch=tmp_path, served={"Shop": service.address}) as shop,
    ):
        task = shop.dataset.heldout(0)
        assert task is not None
        wanted = shelf(None, small=False)[task.data["product"]]
        colour, size = task.data["goal"]["options"]
        results = recipe.index_of(None, small=False).search(wanted.title, top_k=50)
        found = results.index(wanted.product_id)
        pages = ["click[next]"] * (found // 10)
        careful = [f"I look. search[{wanted.title}]", *pages, f"click[{wanted.product_id}]"]
        buys = ["click[description]", f"click[{colour}]", f"Click[ {size.upper()} ]", "click[Buy Now]"]
        for said, earned, bought in (
            ([*careful, *buys], 1.0, 1.0),
            ([*careful, buys[-1]], 3 / 5, 1.0),
            (["nothing"] * 10, 0.0, 0.0),
        ):
            lines = iter(said)

            def say(_: str, lines: Iterator[str] = lines) -> str:
                return next(lines)

            episode = await shop.episode(task, shopper=say)
            (trajectory,) = episode.trajectories
            assert trajectory.reward == pytest.approx(earned)
            assert episode.metrics["environment.bought"] == bought


async def test_only_what_is_shown_can_be_clicked() -> None:
    tasks, shop = recipe.Goals(seed=0, small=True), recipe.Shop(small=True, page_size=2)
    await shop.reset(tasks.train(0))

    async def seen(said: str) -> str:
        observation = await shop.step(Message("assistant", said))
        assert not observation.done
        shown: str = observation.messages[0].content
        return shown

    nothing = "Nothing happened: search[words], or click[what is shown]."
    for said in ("", "click[buy now]", "click[p10]", "click[next]", "search mug"):
        assert await seen(said) == nothing
    first = await seen("search[mug]")
    assert first.count("mug $") == 2
    second = await seen("click[next]")
    assert not set(first.splitlines()) & set(second.splitlines())
    assert await seen("click[prev]") == first
    assert await seen("click[prev]") == nothing
    opened = await seen(f"click[{first.split()[0]}]")
    assert "color: " in opened
    assert await seen("click[mauve]") == nothing
    assert await seen("click[prev]") == first
    assert await seen("search[zebra]") == "Nothing was found."


async def test_a_task_of_another_shop_goes_to_another_node() -> None:
    with pytest.raises(MissingCapability, match=r"no product 'p0007' among its 90; serve it with"):
        await recipe.Shop(small=True).reset(TaskSpec("t", (), {"product": "p0007"}))


def test_no_held_out_product_is_asked_for_in_training_or_demonstrated() -> None:
    for small in (True, False):
        tasks = recipe.Goals(seed=1, small=small)
        trained = {tasks.train(index).data["product"] for index in range(2000)}
        held_out = {tasks.heldout(index).data["product"] for index in range(90)}
        assert not trained & held_out
    asked = {each.messages[0].content.partition(",")[0] for each in islice(recipe.demonstrations(1), 1000)}
    kept = {tasks.heldout(index).data["problem"].partition(",")[0] for index in range(90)}
    assert not asked & kept


def test_every_goal_can_be_met() -> None:
    for small in (True, False):
        products = shelf(None, small=small)
        for goal in recipe.goals(None, small=small)[:500]:
            wanted = products[goal.product_id]
            row = {"attributes": goal.attributes, "options": goal.options, "price_upper": goal.price_upper}
            assert recipe.reward(wanted, wanted=wanted, goal=row, chosen=goal.options)["reward"] == 1.0


def item(asin: str, **differing: object) -> dict[str, object]:
    """A product in WebShop's layout; the text is ours."""
    mug = {
        "asin": asin,
        "name": "Fir Soft Mug with Lid",
        "query": "mugs",
        "product_category": "Kitchen › Tableware › Mugs",
        "pricing": "$12.00 - $14.00",
        "small_description": ["Keeps tea warm"],
        "full_description": "A mug.",
        "customization_options": {"Color": [{"value": "Red "}, {"value": "Blue/White"}], "Fit": None},
    }
    return mug | differing


def write_webshop(folder: Path, items: object, human: object | None = None) -> Path:
    attributes = {
        "instruction": "Find me a soft mug.",
        "attributes": ["soft"],
        "instruction_attributes": ["soft"],
    }
    (folder / "items_shuffle_1000.json").write_text(json.dumps(items))
    (folder / "items_ins_v2_1000.json").write_text(json.dumps({"B01": attributes, "B02": attributes}))
    if human is not None:
        (folder / "items_human_ins.json").write_text(json.dumps(human))
    return folder


async def test_a_webshop_folder_is_read_as_it_is(tmp_path: Path) -> None:
    asked = {
        "instruction": "i want a soft mug.",
        "instruction_attributes": ["soft", "tea"],
        "instruction_options": ["red"],
    }
    none = {"instruction": "anything", "instruction_attributes": [], "instruction_options": []}
    items = [item("B01"), item("B01"), item("B02", pricing=None, customization_options=None), item("nan")]
    folder = write_webshop(tmp_path, items, {"B01": [asked, none] * 5, "B99": [asked]})
    assert set(shelf(folder, small=False)) == {"b01", "b02"}
    assert shelf(folder, small=False)["b02"].price == 100.0
    tasks = recipe.Goals(seed=0, folder=folder)
    assert (len(tasks._train), len(tasks._heldout)) == (4, 1)
    task = tasks.train(0)
    assert "i want a soft mug, and price lower than " in task.messages[0].content
    shop = recipe.Shop(folder=folder)
    await shop.reset(task)
    assert "b01 Fir Soft Mug with Lid $13" in shop.act("search[soft mug]").messages[0].content
    assert "color: red, blue | white" in shop.act("click[B01]").messages[0].content
    shop.act("click[blue | white]")
    shop.act("click[red]")
    assert shop.act("click[buy now]").reward == 1.0


def test_without_what_people_asked_the_generated_instructions_of_webshop_are_used(tmp_path: Path) -> None:
    folder = write_webshop(tmp_path, [item("B01"), item("B02", customization_options={})])
    said = {goal.product_id: goal for goal in recipe.goals(folder, small=False)}
    assert said["b01"].instruction.startswith("Find me a soft mug, ")
    assert (len(said["b01"].options), said["b02"].options) == (1, ())


def malformed(folder: Path) -> Iterator[tuple[str, str]]:
    """What is wrong with a folder, and what is said."""
    yield "", r"has no items_shuffle.json or items_shuffle_1000.json: give a folder .*\./setup\.sh"
    (folder / "items_shuffle.json").write_text('[\n{"asin": }]')
    yield "not JSON", r"items_shuffle\.json:2: not JSON"
    (folder / "items_shuffle.json").unlink()
    write_webshop(folder, {"B01": {}})
    yield "another shape", r"items_shuffle_1000\.json holds a dict, WebShop's a list"
    write_webshop(folder, [item("B01"), item("B02", name=None)])
    yield "no name", r"items_shuffle_1000\.json: product 2 \(B02\): 'name' is None; give a text"
    write_webshop(folder, [item("B01", pricing="cheap")])
    yield "no price", r"product 1 \(B01\): pricing 'cheap'"
    write_webshop(folder, [item("B01")], {"B01": [{"instruction_attributes": ["soft"]}]})
    yield "no instruction", r"items_human_ins\.json: instruction 1 of B01: 'instruction' is None"
    write_webshop(folder, [item("B01")], {"B77": []})
    yield "nothing asked", r"items_human_ins\.json has no instruction with attributes for a product"


def test_what_is_wrong_with_a_webshop_folder_is_named(tmp_path: Path) -> None:
    for _, said in malformed(tmp_path):
        shelf.cache_clear()
        with pytest.raises(RecipeError, match=said):
            recipe.Goals(seed=0, folder=tmp_path)


async def test_a_run_with_a_folder_that_is_not_there_is_refused_with_the_command(tmp_path: Path) -> None:
    settings = ("run.dataset.with.folder=nowhere", "raas.workflow.with.environment=recipe:Shop")
    with pytest.raises(PluginError, match=r"git clone https://github\.com/princeton-nlp/WebShop"):
        async with played("shop", *settings, scratch=tmp_path):
            pass
