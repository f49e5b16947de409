"""The spool keeps unacknowledged episodes, in order, within the window; acknowledged ones a little longer."""

import asyncio
from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from astraflow.dataflow.v1 import durability_pb2
from astraflow.dataflow.v1.trajectory_service_pb2 import PushResult
from astraflow.rollout.v1 import trajectory_pb2
from astraflow_raas.push.spool import Spool, Spooled, SpoolLimits
from support.manual_clock import ManualClock

MEMORY = PushResult(durability=durability_pb2.DURABILITY_MEMORY)
FSYNCED = PushResult(durability=durability_pb2.DURABILITY_FSYNCED)
LIMITS = SpoolLimits(max_episodes=6, max_bytes=1000, window_episodes=3, window_bytes=300, retain_acked_s=3.0)


def spooled(name: str, *, size_bytes: int = 10) -> Spooled:
    outcome = asyncio.get_running_loop().create_future()
    return Spooled(episode=trajectory_pb2.Episode(episode_id=name), size_bytes=size_bytes, outcome=outcome)


def sent(spool: Spool) -> list[str]:
    """What is sent until nothing more may be."""
    return [item.episode.episode_id for item in iter(spool.next_to_send, None)]


def pass_through(spool: Spool, name: str, answer: PushResult) -> Spooled:
    """Add, send and acknowledge one episode."""
    spool.add(spooled(name))
    spool.next_to_send()
    return spool.acknowledge(answer)


CLOCK = ManualClock()


@pytest.fixture
def spool() -> Spool:
    return Spool(limits=LIMITS, clock=CLOCK)


async def test_the_window_bounds_what_is_in_flight_and_a_broken_stream_sends_it_again(spool: Spool) -> None:
    for name in "abcde":
        spool.add(spooled(name))
    assert sent(spool) == ["a", "b", "c"]
    spool.acknowledge(MEMORY)
    assert sent(spool) == ["d"]
    spool.stream_broke()
    assert sent(spool) == ["b", "c", "d"]


async def test_an_episode_larger_than_the_window_still_goes_alone(spool: Spool) -> None:
    spool.add(spooled("huge", size_bytes=900))
    spool.add(spooled("small"))
    assert sent(spool) == ["huge"]


async def test_what_is_only_in_memory_is_pushed_again_after_the_data_was_lost(spool: Spool) -> None:
    assert pass_through(spool, "old", MEMORY).outcome.result() == MEMORY
    pass_through(spool, "safe", FSYNCED)
    CLOCK.now_s += 3.5
    pass_through(spool, "fresh", MEMORY)
    assert spool.data_was_lost() == spool.num_repeated == 1
    assert sent(spool) == ["fresh"]
    # Its waiter was answered long ago: a second answer must not disturb it.
    spool.acknowledge(MEMORY)
    assert spool.num_repeated == 0


async def test_room_is_bounded_by_episodes_and_bytes(spool: Spool) -> None:
    assert spool.has_room(10**9)
    spool.add(spooled("a", size_bytes=995))
    assert not spool.has_room(10)
    spool.next_to_send()
    spool.acknowledge(FSYNCED)
    for name in "bcdefg":
        assert spool.has_room(10)
        spool.add(spooled(name))
    assert not spool.has_room(10)


async def test_what_is_not_safe_yet_takes_room_and_is_released_once() -> None:
    released: list[str] = []
    spool = Spool(limits=LIMITS, clock=CLOCK, released=lambda item: released.append(item.episode.episode_id))
    for name in "abcdef":
        pass_through(spool, name, FSYNCED if name == "b" else MEMORY)
    assert released == ["b"]
    assert (spool.num_kept, spool.num_waiting, spool.num_bytes) == (5, 0, 50)
    assert spool.has_room(10)
    spool.add(spooled("g"))
    assert not spool.has_room(10)
    CLOCK.now_s += 3.5
    assert spool.has_room(10)
    assert released == ["b", "a", "c", "d", "e", "f"]
    assert (spool.num_kept, spool.num_bytes) == (1, 10)


def committed_at(position: int) -> PushResult:
    return PushResult(durability=durability_pb2.DURABILITY_MEMORY, position=position)


async def test_once_the_server_tells_what_is_durable_time_alone_releases_nothing(spool: Spool) -> None:
    for position, name in enumerate("abc", start=5):
        pass_through(spool, name, committed_at(position))
    spool.durable(5)
    assert spool.num_kept == 2
    CLOCK.now_s += 1000
    spool.forget_safe()
    assert spool.num_kept == 2
    spool.durable(6)
    assert spool.data_was_lost() == 1
    assert sent(spool) == ["c"]


async def test_a_watermark_of_lost_data_says_nothing_about_new_commits(spool: Spool) -> None:
    spool.durable(100)
    spool.data_was_lost()
    pass_through(spool, "a", committed_at(7))
    assert spool.num_kept == 1
    spool.durable(7)
    assert spool.num_kept == 0


@given(st.lists(st.integers(1, 200) | st.sampled_from(["send", "acknowledge", "break"]), max_size=40))
async def test_in_any_order_of_events_nothing_is_lost_or_answered_twice(events: list[int | str]) -> None:
    """A number is an episode of this size that is added."""
    spool = Spool(limits=LIMITS, clock=ManualClock())
    waiting: deque[str] = deque()
    num_in_flight = 0
    for number, event in enumerate(events):
        if isinstance(event, int) and spool.has_room(event):
            spool.add(spooled(str(number), size_bytes=event))
            waiting.append(str(number))
        elif event == "send" and (item := spool.next_to_send()):
            assert item.episode.episode_id == waiting[num_in_flight]
            num_in_flight += 1
        elif event == "acknowledge" and num_in_flight:
            item = spool.acknowledge(FSYNCED)
            assert item is not None
            assert item.episode.episode_id == waiting.popleft()
            num_in_flight -= 1
        elif event == "break":
            spool.stream_broke()
            num_in_flight = 0
        assert spool.num_waiting == len(waiting)
        assert num_in_flight <= LIMITS.window_episodes
        assert spool.num_waiting or not spool.num_bytes
