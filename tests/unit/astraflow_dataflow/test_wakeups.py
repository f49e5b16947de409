"""Wake-ups lose nothing between opening the subscription and waiting."""

from __future__ import annotations

import asyncio

from astraflow_dataflow.records import Event
from astraflow_dataflow.wakeups import Wakeups


async def test_an_event_before_the_wait_is_not_lost() -> None:
    wakeups = Wakeups()
    with wakeups.subscribe("work") as inbox:
        wakeups.deliver(Event(topic="work", fields={}))
        assert [event.topic for event in await inbox.wait(0)] == ["work"]
        assert await inbox.wait(0) == []


async def test_only_the_topics_asked_for_arrive() -> None:
    wakeups = Wakeups()
    with wakeups.subscribe("ready p") as inbox:
        wakeups.deliver(Event(topic="ready q", fields={}))
        wakeups.deliver(Event(topic="ready p", fields={}))
        assert [event.topic for event in await inbox.wait(0)] == ["ready p"]


async def test_signals_are_merged_and_messages_are_not() -> None:
    wakeups = Wakeups()
    with wakeups.subscribe("work", "node n") as inbox:
        for lease in ("a", "b"):
            wakeups.deliver(Event(topic="work", fields={}))
            wakeups.deliver(Event(topic="node n", fields={"lease": lease}))
        events = await inbox.wait(0)
        assert [event.fields.get("lease") for event in events] == [None, "a", "b"]


async def test_a_waiter_is_woken_by_a_poke_and_by_wake_all() -> None:
    wakeups = Wakeups()
    with wakeups.subscribe("work") as inbox:
        for wake in (inbox.poke, wakeups.wake_all):
            waiting = asyncio.create_task(inbox.wait(30))
            await asyncio.sleep(0)
            wake()
            assert await waiting == []


async def test_a_closed_subscription_receives_nothing() -> None:
    wakeups = Wakeups()
    with wakeups.subscribe("work") as inbox:
        pass
    wakeups.deliver(Event(topic="work", fields={}))
    assert await inbox.wait(0) == []


async def test_a_cancelled_waiter_stops_although_an_event_arrives_with_the_cancellation() -> None:
    wakeups = Wakeups()

    async def forever() -> None:
        with wakeups.subscribe("work") as inbox:
            while True:
                await inbox.wait(30)

    waiting = asyncio.create_task(forever())
    await asyncio.sleep(0)
    wakeups.deliver(Event(topic="work", fields={}))
    waiting.cancel()
    await asyncio.wait([waiting], timeout=5)
    assert waiting.cancelled()
