"""The window of a push stream: bounded, answered in order."""

import asyncio

import pytest

from astraflow_dataflow.episodes.push_window import MAX_BYTES, MAX_EPISODES, PushWindow


async def answered(number: int, gate: asyncio.Event | None = None) -> int:
    """A push that ends when the gate opens."""
    if gate is not None:
        await gate.wait()
    return number


async def test_answers_keep_the_order_of_the_requests() -> None:
    window, gate = PushWindow[int](), asyncio.Event()
    await window.add(1, 10, answered(1, gate))
    await window.add(1, 10, answered(2))
    await window.end()
    asyncio.get_running_loop().call_later(0.01, gate.set)
    assert [answer async for answer in window.answers()] == [1, 2]


@pytest.mark.parametrize(
    ("num_episodes", "size_bytes", "room"),
    [
        (1, 1, MAX_EPISODES),
        (MAX_EPISODES // 4, 1, 4),
        (1, MAX_BYTES // 2, 2),
        (1, 2 * MAX_BYTES, 1),
    ],
)
async def test_a_full_window_stops_reading_until_an_answer_leaves(
    num_episodes: int, size_bytes: int, room: int
) -> None:
    window, gate = PushWindow[int](), asyncio.Event()
    added = 0

    async def fill() -> None:
        nonlocal added
        for number in range(room + 1):
            added += 1
            await window.add(num_episodes, size_bytes, answered(number, gate))
        await window.end()

    filling = asyncio.create_task(fill())
    await asyncio.sleep(0.01)
    assert (filling.done(), added) == (False, room)
    gate.set()
    assert len([answer async for answer in window.answers()]) == room + 1
    await filling


async def test_an_error_is_raised_in_its_turn() -> None:
    async def broken() -> int:
        raise ValueError("broken")

    window = PushWindow[int]()
    await window.add(1, 1, answered(1))
    await window.add(1, 1, broken())
    await window.end()
    answers = window.answers()
    assert await anext(answers) == 1
    with pytest.raises(ValueError, match="broken"):
        await anext(answers)
    window.close()


async def test_closing_cancels_what_is_inside() -> None:
    window, gate = PushWindow[int](), asyncio.Event()
    await window.add(1, 1, answered(1, gate))
    window.close()
    await window.end()
    assert [item async for item in window.answers()] == []
