"""The recipe of many turns: splits that never meet, a game that halving always wins, demonstrations of both habits."""

import asyncio
from collections.abc import Callable
from itertools import islice

import pytest

from astraflow.plugins import Message, TaskSpec
from support.recipes import recipe_code

recipe = recipe_code("number-search-tiny")


async def guesses_until_found(secret: int, choose: Callable[[int, int], int]) -> int:
    """How many guesses found it; 0 if none did."""
    game = recipe.NumberSearch()
    seen = await game.reset(TaskSpec("t", (), {"low": 20, "secret": secret}))
    while not seen.done:
        low, high = map(int, seen.messages[0].content.rstrip("?").split("-"))
        seen = await game.step(Message("assistant", str(choose(low, high))))
    return int(seen.metrics["guesses"]) if seen.reward else 0


def found(choose: Callable[[int, int], int]) -> list[int]:
    return [asyncio.run(guesses_until_found(20 + place, choose)) for place in range(recipe.NUMBERS)]


def test_halving_finds_every_number_and_counting_up_finds_the_lowest() -> None:
    assert sorted(found(lambda low, high: (low + high) // 2)) == [1, 2, 2, *[3] * 4, *[4] * 8]
    assert found(lambda low, high: low) == [1, 2, 3, 4, *[0] * 11]


@pytest.mark.parametrize("guess", ["", "99", "19", "-25", "twenty", "25.", "٢٥"])
def test_what_is_no_number_of_the_range_costs_a_guess_and_tells_nothing(guess: str) -> None:
    async def play() -> list[str]:
        game = recipe.NumberSearch()
        seen = [await game.reset(TaskSpec("t", (), {"low": 20, "secret": 25}))]
        while not seen[-1].done:
            seen.append(await game.step(Message("assistant", guess)))
        return [message.content for each in seen for message in each.messages]

    assert asyncio.run(play()) == ["20-34?"] * (1 + recipe.GUESSES)


def test_no_held_out_range_is_trained_on_or_demonstrated() -> None:
    ranges = recipe.Ranges(seed=1)
    trained = {ranges.train(index).data["low"] for index in range(300)}
    held_out = {ranges.heldout(index).data["low"] for index in range(300)}
    shown = {int(d.messages[0].content.split("-")[0]) for d in islice(recipe.demonstrations(1), 300)}
    assert not held_out & (trained | shown)


def test_every_second_demonstration_halves_and_the_others_take_the_lowest() -> None:
    for number, demonstration in enumerate(islice(recipe.demonstrations(1), 200)):
        low, high = map(int, demonstration.messages[-1].content.rstrip("?").split("-"))
        assert int(demonstration.completion) == (low if number % 2 else (low + high) // 2)
