"""The window of a push stream: bounded, taken together, answered in order and together."""

import asyncio
import random
from collections.abc import Sequence

import pytest

from astraflow_dataflow.episodes import push_window
from astraflow_dataflow.episodes.push_window import MAX_BYTES, MAX_EPISODES, PushWindow


class Work:
    """Answers each request with itself, all that were taken together when the gate opens."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.taken: list[list[int]] = []

    async def __call__(self, requests: Sequence[int]) -> list[int | Exception]:
        """Answer; requests below 0 are broken, below -9 all that is taken with them is."""
        self.taken.append(list(requests))
        await self.gate.wait()
        if min(requests) < -9:
            raise ValueError("all broken")
        return [number if number >= 0 else ValueError("broken") for number in requests]


@pytest.fixture
def work() -> Work:
    """An open gate is `work.gate.set()`."""
    return Work()


async def answered(window: PushWindow[int, int]) -> list[int]:
    """All answers, in order."""
    return [answer async for some in window.answers() for answer in some]


async def test_answers_keep_the_order_of_the_requests(work: Work) -> None:
    window = PushWindow[int, int](work)
    for number in range(5):
        await window.add(1, 10, number)
        await asyncio.sleep(0)
    await window.end()
    asyncio.get_running_loop().call_later(0.01, work.gate.set)
    assert await answered(window) == [0, 1, 2, 3, 4]


async def test_requests_that_come_while_others_are_in_hand_are_taken_together(work: Work) -> None:
    window = PushWindow[int, int](work)
    for number in range(9):
        await window.add(1, 10, number)
        await asyncio.sleep(0)
    work.gate.set()
    await window.end()
    assert await answered(window) == list(range(9))
    assert work.taken == [[0], [1, 2, 3, 4, 5, 6, 7, 8]]


async def test_answers_that_are_there_together_are_given_together_up_to_an_error(work: Work) -> None:
    window = PushWindow[int, int](work)
    for number in (0, 1, 2, -1, 4):
        await window.add(1, 10, number)
        await asyncio.sleep(0)
    await window.end()
    work.gate.set()
    given = window.answers()
    assert await anext(given) == [0, 1, 2]
    with pytest.raises(ValueError, match="broken"):
        await anext(given)
    assert work.taken == [[0], [1, 2, -1, 4]]
    window.close()


async def test_on_a_busy_stream_several_are_waited_for_and_on_a_quiet_one_nothing(
    work: Work, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(push_window, "_LEAST_WAIT_S", 60.0)
    monkeypatch.setattr(push_window, "_MOST_WAIT_S", 60.0)
    window, answers = PushWindow[int, int](work), list[int]()
    work.gate.set()
    answering = window.answers()
    for number in range(3):
        await window.add(1, 10, number)
        answers += await anext(answering)
    assert answers == [0, 1, 2]
    assert work.taken == [[0], [1], [2]], "one after the other it is quiet"
    for number in range(3, 6):
        await window.add(1, 10, number)
        await asyncio.sleep(0.001)
    assert work.taken[3:] == [[3]], "more may come"
    await window.end()
    assert [answer async for some in answering for answer in some] == [3, 4, 5]
    assert work.taken[3:] == [[3], [4, 5]]


@pytest.mark.parametrize("num_episodes", [1, MAX_EPISODES // 8])
async def test_half_of_the_window_is_taken_as_soon_as_it_is_there(
    work: Work, monkeypatch: pytest.MonkeyPatch, num_episodes: int
) -> None:
    monkeypatch.setattr(push_window, "_LEAST_WAIT_S", 60.0)
    monkeypatch.setattr(push_window, "_MOST_WAIT_S", 60.0)
    window, num_requests = PushWindow[int, int](work), MAX_EPISODES // num_episodes

    async def fill() -> None:
        for number in range(num_requests + 1):
            await window.add(num_episodes, 10, number)
        await window.end()

    filling = asyncio.create_task(fill())
    await asyncio.sleep(0.01)
    first, second = work.taken
    assert len(first) == len(second) == num_requests // 2, "one half is in hand while the other is taken"
    assert first + second == list(range(num_requests))
    work.gate.set()
    assert await answered(window) == list(range(num_requests + 1))
    await filling


async def test_the_other_half_is_taken_even_if_both_came_while_one_was_gathered(
    work: Work, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(push_window, "_LEAST_WAIT_S", 60.0)
    monkeypatch.setattr(push_window, "_MOST_WAIT_S", 60.0)
    window, num_episodes = PushWindow[int, int](work), MAX_EPISODES // 8
    work.gate.set()
    await window.add(num_episodes, 10, 0)
    await asyncio.sleep(0.01)
    work.gate.clear()

    async def fill() -> None:
        for number in range(1, 9):
            await window.add(num_episodes, 10, number)
            if number == 1:
                await asyncio.sleep(0.01)  # one gathers by now
        await window.end()

    filling = asyncio.create_task(fill())
    await asyncio.sleep(0.05)
    assert work.taken == [[0], [1, 2, 3, 4], [5, 6, 7]], "all that the window holds is in hand"
    work.gate.set()
    assert await answered(window) == list(range(9))
    await filling


@pytest.mark.parametrize(("gap_s", "wait_s"), [(0.0001, 0.004), (0.002, 0.016), (1.0, 0.032)])
async def test_requests_are_waited_for_as_long_as_several_take_at_their_pace(
    work: Work, monkeypatch: pytest.MonkeyPatch, gap_s: float, wait_s: float
) -> None:
    window, now_s = PushWindow[int, int](work), 0.0
    monkeypatch.setattr(push_window, "_now_s", lambda: now_s)
    for number in range(40):
        await window.add(1, 10, number)
        now_s += gap_s
    assert window.wait_s == pytest.approx(wait_s, rel=0.01)
    window.close()


async def test_a_request_that_comes_when_all_that_was_in_hand_has_just_been_answered_is_taken(
    work: Work,
) -> None:
    window = PushWindow[int, int](work)
    for number in range(2):
        await window.add(1, 10, number)
        await asyncio.sleep(0)

    async def add_at_once() -> None:
        await work.gate.wait()
        await window.add(1, 10, 2)
        await window.end()

    adding = asyncio.create_task(add_at_once())
    await asyncio.sleep(0)
    work.gate.set()
    async with asyncio.timeout(60):
        assert await answered(window) == [0, 1, 2]
    await adding


@pytest.mark.parametrize("seed", range(4))
async def test_whenever_requests_come_each_is_answered_once(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr(push_window, "_LEAST_WAIT_S", 0)
    monkeypatch.setattr(push_window, "_MOST_WAIT_S", 0)
    draw, taken = random.Random(seed), list[int]()

    async def work(requests: Sequence[int]) -> list[int | Exception]:
        assert requests
        taken.extend(requests)
        for _ in range(draw.randrange(4)):
            await asyncio.sleep(0)
        return list(requests)

    window = PushWindow[int, int](work)

    async def fill() -> None:
        for number in range(200):
            await window.add(1, 10, number)
            for _ in range(draw.randrange(4)):
                await asyncio.sleep(0)
        await window.end()

    filling = asyncio.create_task(fill())
    async with asyncio.timeout(60):
        assert await answered(window) == list(range(200))
    assert taken == list(range(200))
    await filling


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
    work: Work, num_episodes: int, size_bytes: int, room: int
) -> None:
    window = PushWindow[int, int](work)
    added = 0

    async def fill() -> None:
        nonlocal added
        for number in range(room + 1):
            added += 1
            await window.add(num_episodes, size_bytes, number)
        await window.end()

    filling = asyncio.create_task(fill())
    await asyncio.sleep(0.01)
    assert (filling.done(), added) == (False, room)
    work.gate.set()
    assert len(await answered(window)) == room + 1
    await filling


@pytest.mark.parametrize(("broken", "message"), [(-1, "broken"), (-10, "all broken")])
async def test_an_error_is_raised_in_its_turn(work: Work, broken: int, message: str) -> None:
    window = PushWindow[int, int](work)
    work.gate.set()
    for number in (1, broken, 3):
        await window.add(1, 1, number)
        await asyncio.sleep(0.001)
    await window.end()
    answers = window.answers()
    assert await anext(answers) == [1]
    with pytest.raises(ValueError, match=message):
        await anext(answers)
    window.close()


async def test_closing_leaves_what_is_inside(work: Work) -> None:
    window = PushWindow[int, int](work)
    await window.add(1, 1, 1)
    await asyncio.sleep(0)
    window.close()
    await window.end()
    assert await answered(window) == []
    await asyncio.sleep(0)
    assert not [task for task in asyncio.all_tasks() if task.get_name() == "pushes in hand"]
