"""A Gymnasium environment played in words."""

from typing import Any

import pytest

from astraflow.plugins import Message, Observation, TaskSpec
from astraflow_environment.adapters.gymnasium_text import GymnasiumText

pytest.importorskip("gymnasium", reason="needs astraflow[gymnasium]")

LAKE: dict[str, Any] = {
    "env_id": "FrozenLake-v1",
    "actions": ("left", "down", "right", "up"),
    "kwargs": {"is_slippery": False},
}


async def played(*words: str, **differing: Any) -> list[Observation]:
    """What is seen, first and after each answer."""
    lake = GymnasiumText(**(LAKE | differing))
    seen = [await lake.reset(TaskSpec("t1", (), {"seed": 7}))]
    seen += [await lake.step(Message("assistant", word)) for word in words]
    await lake.close()
    return seen


async def test_the_last_word_that_names_an_action_is_carried_out() -> None:
    path = ("down", "I go left or DOWN.", "right", "right", "down", "right")
    seen = await played(*path)
    assert seen[0].messages[0].content.endswith("Actions: left, down, right, up")
    assert "[S]FFF" in seen[0].messages[0].content
    assert [(each.reward, each.done) for each in seen[1:]] == [(0.0, False)] * 5 + [(1.0, True)]


async def test_an_answer_without_an_action_costs_a_turn_only() -> None:
    _, hint, again = await played("lefty", "down")
    assert hint.messages[0].content.startswith("No action in that. Actions: left")
    assert (hint.metrics, again.metrics) == ({"invalid": 1.0}, {"invalid": 0.0})


async def test_equal_tasks_start_equally() -> None:
    cards = {"env_id": "Blackjack-v1", "actions": (), "kwargs": {}}
    assert (await played(**cards))[0] == (await played(**cards))[0]


@pytest.mark.parametrize(
    ("differing", "why"),
    [
        ({"actions": ("left", "right")}, "has 4 actions, `actions` names 2"),
        ({"env_id": "Pendulum-v1", "actions": (), "kwargs": {}}, "only Discrete and Text actions"),
    ],
)
async def test_what_cannot_be_written_as_words_is_refused(differing: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        await played(**differing)
