"""A folder in WebShop's layout: its products, and what people asked for; and which catalogue settings mean.

Invariant: files are read where they lie; equal files give equal products and goals in equal order, in every process.
Used by recipe.py on dataflow servers and trainers, by shop.py where it is served.
"""

import json
import random
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from astraflow.errors import RecipeError

from .catalogue import (  # noqa: TID252 - the file beside this one
    Goal,
    Product,
    generated_goals,
    generated_products,
    small_products,
)

BRING = (
    "give a folder with items_shuffle.json (or items_shuffle_1000.json) and items_human_ins.json or items_ins_v2.json, "
    "which WebShop's own setup downloads to WebShop/data: git clone https://github.com/princeton-nlp/WebShop && "
    "cd WebShop && ./setup.sh -d small"
)
NO_BOUND = 1e6


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
        said = (item.get("pricing") or "$100").split("$")[1:3]
        prices = [float(re.sub(r"[^\d.]", "", price)) for price in said]  # such as `$7 - $9`, `$1,200.00`
        options = {  # as the site shows them, which is what people chose from
            name.lower(): tuple(each["value"].strip().replace("/", " | ").lower() for each in values)
            for name, values in named
            if values
        }
        middle = sum(prices) / len(prices)
    except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError) as error:
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
