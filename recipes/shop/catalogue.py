"""What the shop sells and what customers want: generated, or read from a folder in WebShop's layout.

Invariant: equal settings give equal products and goals in equal order, in every process; a product belongs to one split
for ever where it is generated. Used by recipe.py on dataflow servers, trainers and environment services.
"""

import json
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product as every
from pathlib import Path
from typing import Any

from astraflow.errors import RecipeError

BRING = (
    "give a folder with items_shuffle.json (or items_shuffle_1000.json) and items_human_ins.json or items_ins_v2.json, "
    "which WebShop's own setup downloads to WebShop/data: git clone https://github.com/princeton-nlp/WebShop && "
    "cd WebShop && ./setup.sh -d small"
)
KINDS = {
    "mug": ("kitchen", "tableware"),
    "pan": ("kitchen", "cookware"),
    "jug": ("kitchen", "tableware"),
    "hat": ("clothing", "headwear"),
    "cap": ("clothing", "headwear"),
    "coat": ("clothing", "outerwear"),
    "lamp": ("home", "lighting"),
    "rug": ("home", "textiles"),
    "desk": ("office", "furniture"),
    "bag": ("travel", "luggage"),
}
ATTRIBUTES = ("soft", "light", "warm", "round", "tall", "plain", "shiny", "sturdy", "foldable")
COLORS = ("red", "blue", "green", "black", "white", "gold")
SIZES = ("small", "medium", "large", "wide")
BRANDS = ("Alder", "Birch", "Cedar", "Fir", "Hazel", "Larch", "Maple", "Rowan")
NUM_GENERATED, SMALL_IDS = 2000, range(10, 100)
NO_BOUND = 1e6


@dataclass(frozen=True, kw_only=True)
class Product:
    """One product; `kind` is what its seller would search for, `options` are what a buyer chooses by name."""

    product_id: str
    title: str
    kind: str
    categories: frozenset[str]
    attributes: tuple[str, ...]
    options: Mapping[str, tuple[str, ...]]
    price: float
    text: str


@dataclass(frozen=True, kw_only=True)
class Goal:
    """What a customer wants: a product like this one, with these attributes and options, at no higher a price."""

    instruction: str
    product_id: str
    attributes: tuple[str, ...]
    options: tuple[str, ...]
    price_upper: float
    is_held_out: bool


@cache
def catalogue(folder: Path | None, *, small: bool) -> Mapping[str, Product]:
    """Products by id. Raises RecipeError for a folder without them, and names what is malformed."""
    found = webshop_products(folder) if folder else small_products() if small else generated_products()
    return {each.product_id: each for each in found}


def goals(folder: Path | None, *, small: bool) -> list[Goal]:
    """All goals, in an order that says nothing about the products. Raises as `catalogue` does."""
    products = catalogue(folder, small=small)
    found = list(webshop_goals(folder, products) if folder else generated_goals(products, small=small))
    random.Random(233).shuffle(found)
    return found


def small_products() -> Iterator[Product]:
    """One product of each attribute and kind, with ids in no order and three colours each."""
    ids = random.Random("ids").sample(SMALL_IDS, len(SMALL_IDS))
    for number, (attribute, kind) in zip(ids, every(ATTRIBUTES, KINDS), strict=True):
        rng = random.Random(f"{attribute} {kind}")
        yield Product(
            product_id=f"p{number}",
            title=f"{attribute} {kind}",
            kind=kind,
            categories=frozenset(KINDS[kind]),
            attributes=(attribute,),
            options={"color": tuple(rng.sample(COLORS, 3))},
            price=float(rng.randint(10, 69)),
            text="",
        )


def generated_products() -> Iterator[Product]:
    """Products of three attributes, of which the title names one and the description the others."""
    for number in range(NUM_GENERATED):
        rng = random.Random(f"product/{number}")
        kind, attributes = rng.choice(list(KINDS)), tuple(rng.sample(ATTRIBUTES, 3))
        yield Product(
            product_id=f"p{number:04}",
            title=f"{rng.choice(BRANDS)} {attributes[0]} {kind}",
            kind=kind,
            categories=frozenset(KINDS[kind]),
            attributes=attributes,
            options={"color": tuple(rng.sample(COLORS, 3)), "size": tuple(rng.sample(SIZES, 3))},
            price=rng.randint(5, 89) + 0.99,
            text=f"This {kind} is {attributes[1]} and {attributes[2]}.",
        )


def generated_goals(products: Mapping[str, Product], *, small: bool) -> Iterator[Goal]:
    """Each product with each choice of its options and one of three bounds on the price; each ninth is held out."""
    for number, each in enumerate(products.values()):
        wanted = each.attributes[:2]
        for higher, chosen in every(range(1, 4), every(*each.options.values())):
            upper = 10.0 * (each.price // 10 + higher)
            looking = f"{' '.join(wanted)} {each.kind}, {', '.join(chosen)}, under {upper:g}"
            named = ", and ".join(
                f"{name}: {value}" for name, value in zip(each.options, chosen, strict=True)
            )
            said = (
                f"I am looking for a {each.kind} that is {' and '.join(wanted)}, with {named}, and price lower than "
                f"{upper:.2f} dollars"
            )
            yield Goal(
                instruction=looking if small else said,
                product_id=each.product_id,
                attributes=wanted,
                options=chosen,
                price_upper=upper,
                is_held_out=number % 9 == 0,
            )


def webshop_products(folder: Path) -> Iterator[Product]:
    """The products of WebShop's files; of a range of prices the middle."""
    file, items = _read(folder, "items_shuffle.json", "items_shuffle_1000.json", kind=list)
    _, described = _read(folder, "items_ins_v2.json", "items_ins_v2_1000.json", kind=dict)
    seen = set[str]()
    for number, item in enumerate(items, start=1):
        place = f"{file}: product {number}"
        asin = _text(item, "asin", place=place)
        if asin == "nan" or len(asin) > 10 or asin in seen:
            continue
        seen.add(asin)
        yield _webshop_product(item, described.get(asin, {}), place=f"{place} ({asin})")


def _webshop_product(item: Mapping[str, Any], described: Mapping[str, Any], *, place: str) -> Product:
    features, full = item.get("small_description") or [], item.get("full_description") or ""
    named = (item.get("customization_options") or {}).items()
    try:
        prices = [float(price.replace(",", "")) for price in (item.get("pricing") or "$100").split("$")[1:3]]
        options = {
            name.lower(): tuple(each["value"].strip().lower() for each in values)
            for name, values in named
            if values
        }
        middle = sum(prices) / len(prices)
    except (ArithmeticError, KeyError, TypeError, ValueError) as error:
        raise RecipeError(
            f"{place}: pricing {item.get('pricing')!r}, customization_options {item.get('customization_options')!r}: "
            "give $PRICE or $LOW$HIGH, and a list of {value: …} for each name"
        ) from error
    return Product(
        product_id=item["asin"].lower(),
        title=_text(item, "name", place=place),
        kind=_text(item, "query", place=place).lower().strip(),
        categories=frozenset(
            part.strip() for part in _text(item, "product_category", place=place).split("›")
        ),
        attributes=tuple(described.get("attributes", ())),
        options=options,
        price=middle,
        text="\n".join([*([features] if isinstance(features, str) else features), full]),
    )


def webshop_goals(folder: Path, products: Mapping[str, Product]) -> Iterator[Goal]:
    """What people asked for, else what is generated from attributes; the first 500 of a shuffle are held out, a fifth
    at most.
    """
    has_people = (folder / "items_human_ins.json").is_file()
    names = ("items_human_ins.json",) if has_people else ("items_ins_v2.json", "items_ins_v2_1000.json")
    file, asked = _read(folder, *names, kind=dict)
    wanted = [
        (products[asin.lower()], each, f"{file}: instruction {place} of {asin}")
        for asin, given in asked.items()
        if asin.lower() in products
        for place, each in enumerate(given if isinstance(given, list) else [given], start=1)
        if each.get("instruction_attributes")
    ]
    if not wanted:
        raise RecipeError(f"{file} has no instruction with attributes for a product of {folder}: {BRING}")
    held_out = set(random.Random(500).sample(range(len(wanted)), min(500, len(wanted) // 5)))
    for number, (wants, given, place) in enumerate(wanted):
        yield _webshop_goal(wants, given, place=place, is_held_out=number in held_out)


def _webshop_goal(wants: Product, given: Mapping[str, Any], *, place: str, is_held_out: bool) -> Goal:
    rng = random.Random(place.rpartition(":")[2])
    bounds = [bound for bound in range(10, 1000, 10) if bound > wants.price][:4]
    upper = float(max(rng.sample(bounds, 2))) if len(bounds) > 1 else NO_BOUND
    price = f", and price lower than {upper:.2f} dollars" if upper < NO_BOUND else ""
    options = given.get("instruction_options", [rng.choice(values) for values in wants.options.values()])
    named = "" if "instruction_options" in given else "".join(f", {value}" for value in options)
    return Goal(
        instruction=_text(given, "instruction", place=place).strip(".") + named + price,
        product_id=wants.product_id,
        attributes=tuple(given["instruction_attributes"]),
        options=tuple(options.values() if isinstance(options, dict) else options),
        price_upper=upper,
        is_held_out=is_held_out,
    )


def reward(
    bought: Product, *, wanted: Product, goal: Mapping[str, Any], chosen: Sequence[str]
) -> dict[str, float]:
    """WebShop's reward (arXiv 2207.01206, section 3.3), from 0 to 1: the type's factor times the share of attributes,
    options and price that are met. `reward`, and `type`, `attributes`, `options`, `price`. Of titles the words that
    name no attribute are compared where WebShop takes nouns, and values as they are where it compares loosely.
    """
    described = f"{bought.title}\n{bought.text}".lower()
    attributes = sum(each in bought.attributes or each.lower() in described for each in goal["attributes"])
    options = len({each.lower() for each in goal["options"]} & set(chosen))
    price = bought.price <= goal["price_upper"]
    factor = _type_factor(bought, wanted)
    asked = len(goal["attributes"]) + len(goal["options"]) + 1
    return {
        "reward": factor * (attributes + options + price) / asked,
        "type": factor,
        "attributes": attributes / max(1, len(goal["attributes"])),
        "options": options / max(1, len(goal["options"])),
        "price": float(price),
    }


def _type_factor(bought: Product, wanted: Product) -> float:
    words, wanted_words = (
        set(re.findall(r"\w{2,}", each.title.lower())) - set(" ".join(each.attributes).lower().split())
        for each in (bought, wanted)
    )
    shared = len(words & wanted_words) / len(wanted_words) if wanted_words else 0.2
    if shared < 0.1:
        return 0.1 if shared else 0.0
    is_alike = bought.kind == wanted.kind or len(bought.categories & wanted.categories) > 1 or shared > 0.2
    return 1.0 if is_alike else 0.5


def _read(folder: Path, *names: str, kind: type) -> tuple[Path, Any]:
    file = next((folder / name for name in names if (folder / name).is_file()), None)
    if file is None:
        raise RecipeError(f"{folder.absolute()} has no {' or '.join(names)}: {BRING}")
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise RecipeError(f"{file}:{getattr(error, 'lineno', 1)}: not JSON ({error}): {BRING}") from error
    if not isinstance(found, kind):
        raise RecipeError(f"{file} holds a {type(found).__name__}, WebShop's a {kind.__name__}: {BRING}")
    return file, found


def _text(given: object, name: str, *, place: str) -> str:
    value = given.get(name) if isinstance(given, dict) else None
    if not isinstance(value, str):
        raise RecipeError(f"{place}: {name!r} is {value!r}; give a text, as WebShop's files do")
    return value
