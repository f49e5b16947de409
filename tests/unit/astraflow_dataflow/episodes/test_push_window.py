"""The window of a push stream: bounded, answered in order."""

import asyncio

import pytest

from astraflow.dataflow.v1.trajectory_service_pb2 import OUTCOME_ACCEPTED, PushResult
from astraflow_dataflow.episodes.push_window import MAX_BYTES, MAX_REQUESTS, PushWindow


async def accepted(gate: asyncio.Event | None = None) -> PushResult:
    """A push that ends when the gate opens."""
    if gate is not None:
        await gate.wait()
    return PushResult(outcome=OUTCOME_ACCEPTED)


async def test_answers_keep_the_order_of_the_requests() -> None:
    window, gate = PushWindow[int](), asyncio.Event()
    await window.add(1, 10, accepted(gate))
    await window.add(2, 10, accepted())
    await window.end()
    asyncio.get_running_loop().call_later(0.01, gate.set)
    assert [sequence async for sequence, _ in window.answers()] == [1, 2]


@pytest.mark.parametrize(("size_bytes", "room"), [(1, MAX_REQUESTS), (MAX_BYTES // 2, 2), (2 * MAX_BYTES, 1)])
async def test_a_full_window_stops_reading_until_an_answer_leaves(size_bytes: int, room: int) -> None:
    window, gate = PushWindow[int](), asyncio.Event()

    async def fill() -> None:
        for sequence in range(1, room + 2):
            await window.add(sequence, size_bytes, accepted(gate))
        await window.end()

    filling = asyncio.create_task(fill())
    await asyncio.sleep(0.01)
    assert not filling.done()
    gate.set()
    assert len([sequence async for sequence, _ in window.answers()]) == room + 1
    await filling


async def test_an_error_is_raised_in_its_turn() -> None:
    async def broken() -> PushResult:
        raise ValueError("broken")

    window = PushWindow[int]()
    await window.add(1, 1, accepted())
    await window.add(2, 1, broken())
    await window.end()
    answers = window.answers()
    assert (await anext(answers))[0] == 1
    with pytest.raises(ValueError, match="broken"):
        await anext(answers)
    window.close()


async def test_closing_cancels_what_is_inside() -> None:
    window, gate = PushWindow[int](), asyncio.Event()
    await window.add(1, 1, accepted(gate))
    window.close()
    await window.end()
    assert [item async for item in window.answers()] == []
