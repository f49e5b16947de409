"""Wake-ups lose nothing between opening the subscription and waiting."""

import asyncio

import pytest

from astraflow_dataflow.records import Event
from astraflow_dataflow.store.wakeups import Wakeups

WORK = Event(topic="work", fields={})


@pytest.fixture
def wakeups() -> Wakeups:
    return Wakeups()


async def test_an_event_before_the_wait_is_not_lost(wakeups: Wakeups) -> None:
    with wakeups.subscribe("work") as inbox:
        wakeups.deliver(WORK)
        assert [event.topic for event in await inbox.wait(0)] == ["work"]
        assert await inbox.wait(0) == []


async def test_only_the_topics_asked_for_arrive(wakeups: Wakeups) -> None:
    with wakeups.subscribe("ready p") as inbox:
        wakeups.deliver(Event(topic="ready q", fields={}))
        wakeups.deliver(Event(topic="ready p", fields={}))
        assert [event.topic for event in await inbox.wait(0)] == ["ready p"]


async def test_signals_are_merged_and_messages_are_not(wakeups: Wakeups) -> None:
    with wakeups.subscribe("work", "node n") as inbox:
        for lease in ("a", "b"):
            wakeups.deliver(WORK)
            wakeups.deliver(Event(topic="node n", fields={"lease": lease}))
        events = await inbox.wait(0)
        assert [event.fields.get("lease") for event in events] == [None, "a", "b"]


async def test_a_waiter_is_woken_by_a_poke_and_by_wake_all(wakeups: Wakeups) -> None:
    with wakeups.subscribe("work") as inbox:
        for wake in (inbox.poke, wakeups.wake_all):
            waiting = asyncio.create_task(inbox.wait(30))
            await asyncio.sleep(0)
            wake()
            assert await waiting == []


async def test_a_closed_subscription_receives_nothing(wakeups: Wakeups) -> None:
    with wakeups.subscribe("work") as inbox:
        pass
    wakeups.deliver(WORK)
    assert await inbox.wait(0) == []


async def test_a_cancelled_waiter_stops_although_an_event_arrives_with_it(wakeups: Wakeups) -> None:
    async def forever() -> None:
        with wakeups.subscribe("work") as inbox:
            while True:
                await inbox.wait(30)

    waiting = asyncio.create_task(forever())
    await asyncio.sleep(0)
    wakeups.deliver(WORK)
    waiting.cancel()
    await asyncio.wait([waiting], timeout=5)
    assert waiting.cancelled()


class Sessions:
    """Sessions that take turns; `woken` are those that were poked since they last slept."""

    def __init__(self, *names: str, asleep: bool = True) -> None:
        self.wakeups = Wakeups()
        self.work_waiters = self.wakeups.work_waiters
        self.news = self.work_waiters.news
        self.inboxes = {name: self.wakeups.subscribe("node " + name) for name in names}
        self.sleep(*names * asleep)

    def sleep(self, *names: str) -> None:
        for name in names:
            self.work_waiters.wait(self.inboxes[name])

    def ask(self, name: str, *, more: bool) -> None:
        self.work_waiters.ask(self.inboxes[name])
        self.work_waiters.answered(self.inboxes[name], more=more)

    async def woken(self) -> set[str]:
        for inbox in self.inboxes.values():
            inbox.put(Event(topic="probe", fields={}))
        await asyncio.sleep(0)
        return {name for name, inbox in self.inboxes.items() if inbox in self.work_waiters._woken}


async def test_news_wakes_the_one_that_waited_longest_and_no_other() -> None:
    sessions = Sessions("a", "b", "c")
    sessions.wakeups.deliver(WORK)
    assert await sessions.woken() == {"a"}


async def test_the_turn_goes_round_once_while_another_might_get_something() -> None:
    sessions = Sessions("a", "b")
    sessions.news()
    sessions.ask("a", more=True)
    assert await sessions.woken() == {"b"}
    sessions.sleep("a")
    sessions.ask("b", more=True)
    sessions.sleep("b")
    assert await sessions.woken() == set(), "nobody asks twice for the same news"


async def test_the_turn_ends_when_nobody_else_can_get_anything() -> None:
    sessions = Sessions("a", "b")
    sessions.news()
    sessions.ask("a", more=False)
    assert await sessions.woken() == set()


async def test_one_that_was_busy_when_news_came_has_its_turn_as_soon_as_it_sleeps() -> None:
    sessions = Sessions("a", asleep=False)
    sessions.ask("a", more=False)
    sessions.news()
    assert await sessions.woken() == set()
    sessions.sleep("a")
    assert await sessions.woken() == {"a"}


async def test_an_answer_to_older_news_does_not_end_newer_news() -> None:
    sessions = Sessions("a", "b", asleep=False)
    sessions.sleep("a")
    sessions.news()
    sessions.work_waiters.ask(sessions.inboxes["a"])
    sessions.news()
    sessions.work_waiters.answered(sessions.inboxes["a"], more=False)
    sessions.sleep("b")
    assert await sessions.woken() == {"b"}


async def test_a_turn_that_is_not_used_goes_to_the_next() -> None:
    sessions = Sessions("a", "b")
    sessions.news()
    sessions.work_waiters.leave(sessions.inboxes["a"])
    assert await sessions.woken() == {"b"}
