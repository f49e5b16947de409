"""Products, what customers want of them, and what a purchase earns; and the generated ones.

Invariant: equal settings give equal products and goals in equal order, in every process; a product belongs to one split
for ever. webshop.py makes the same of WebShop's files; recipe.py and shop.py use both.
"""

import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product as every
from typing import Any

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
