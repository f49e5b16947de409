"""Wake-ups: what makes a waiting call look again, without polling.

Every state change that somebody may wait for is an entry of the run's event stream in Redis, so waiters of
all server processes hear of it. Open the subscription first and look at the state afterwards: then no event
can fall in between. One `EventReader` per run feeds the `Wakeups` of this process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Self

from astraflow.errors import UnavailableError
from astraflow_dataflow.records import Event
from astraflow_dataflow.store.audit import AuditStore
from astraflow_kit.log import get_logger

log = get_logger(__name__)

_BLOCK_S = 5.0
_RETRY_S = 0.5
_MAX_PENDING = 10_000


class Subscription:
    """Events of some topics since the last `wait`; signals without fields are merged. Use as a context manager."""

    def __init__(self, owner: Wakeups, topics: Iterable[str]) -> None:
        self.topics = frozenset(topics)
        self._owner = owner
        self._pending: list[Event] = []
        self._wake = asyncio.Event()

    def put(self, event: Event) -> None:
        """Deliver an event."""
        if len(self._pending) < _MAX_PENDING and (event.fields or event not in self._pending):
            self._pending.append(event)
        self._wake.set()

    def poke(self) -> None:
        """Wake the waiter without an event."""
        self._wake.set()

    async def wait(self, timeout_s: float) -> list[Event]:
        """Return the events since the last call, waiting up to `timeout_s` for the first; may be empty."""
        try:
            # Not wait_for: in Python 3.11 it loses a cancellation that meets the wake-up.
            async with asyncio.timeout(max(0.0, timeout_s)):
                await self._wake.wait()
        except TimeoutError:
            return []
        self._wake.clear()
        events, self._pending = self._pending, []
        return events

    def __enter__(self) -> Self:
        self._owner.add(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._owner.remove(self)


class WorkWaiters:
    """Whose turn it is to ask for work: a piece of news wakes one of those that wait, not all of them.

    Whoever was woken asks, and when another might get something the next one is woken; nobody is asked twice for the
    same news. One that was busy when its turn came has it as soon as it waits, so no news is missed.
    """

    def __init__(self) -> None:
        self._waiting: dict[Subscription, None] = {}
        self._woken: set[Subscription] = set()
        self._asked: dict[Subscription, int] = {}
        """The newest news each knew when it last asked."""
        self._news = 0
        self._is_open = False
        """Whether the newest news may still mean work for somebody."""

    def news(self) -> None:
        """There may be work."""
        self._news += 1
        self._is_open = True
        self._wake_next()

    def wait(self, subscription: Subscription) -> None:
        """The subscriber wants work and will sleep."""
        self._waiting.setdefault(subscription)
        if self._is_open and self._is_behind(subscription):
            self._wake(subscription)

    def ask(self, subscription: Subscription) -> None:
        """The subscriber asks for work now."""
        self._waiting.pop(subscription, None)
        self._woken.discard(subscription)
        self._asked[subscription] = self._news

    def answered(self, subscription: Subscription, *, more: bool) -> None:
        """Its answer says whether another might get something."""
        if more:
            self._wake_next()
        elif not self._is_behind(subscription):
            self._is_open = False

    def leave(self, subscription: Subscription) -> None:
        """The subscriber wants no work any more; a turn it did not use goes to the next."""
        self._waiting.pop(subscription, None)
        self._asked.pop(subscription, None)
        if subscription in self._woken:
            self._woken.discard(subscription)
            self._wake_next()

    def _wake_next(self) -> None:
        """Wake the one that has waited longest of those that have not asked since the news."""
        for subscription in self._waiting:
            if self._is_behind(subscription):
                self._wake(subscription)
                return

    def _wake(self, subscription: Subscription) -> None:
        del self._waiting[subscription]
        self._woken.add(subscription)
        subscription.poke()

    def _is_behind(self, subscription: Subscription) -> bool:
        return self._asked.get(subscription, -1) < self._news


class Wakeups:
    """The subscriptions of one run in this process."""

    def __init__(self) -> None:
        self._by_topic: dict[str, set[Subscription]] = {}
        self.work_waiters = WorkWaiters()
        """Working sessions that wait for `work`."""

    def subscribe(self, *topics: str) -> Subscription:
        """Return a subscription; it receives events while its `with` block runs."""
        return Subscription(self, topics)

    def add(self, subscription: Subscription) -> None:
        """Start delivering."""
        for topic in subscription.topics:
            self._by_topic.setdefault(topic, set()).add(subscription)

    def remove(self, subscription: Subscription) -> None:
        """Stop delivering."""
        for topic in subscription.topics:
            listeners = self._by_topic.get(topic, set())
            listeners.discard(subscription)
            if not listeners:
                self._by_topic.pop(topic, None)

    def deliver(self, event: Event) -> None:
        """Hand an event to who listens to its topic."""
        for subscription in self._by_topic.get(event.topic, ()):
            subscription.put(event)
        if event.topic == "work":
            self.work_waiters.news()

    def wake_all(self) -> None:
        """Make every waiter look again: after a time in which events may have been missed."""
        for subscription in {item for listeners in self._by_topic.values() for item in listeners}:
            subscription.poke()


class EventReader:
    """Reads one run's event stream into this process's wake-ups."""

    def __init__(
        self,
        audits: AuditStore,
        run_id: str,
        wakeups: Wakeups,
        *,
        after_outage: Callable[[], Awaitable[None]],
    ) -> None:
        self._audits = audits
        self._after_outage = after_outage
        self._run_id = run_id
        self._wakeups = wakeups
        self._after = "0"

    async def start(self) -> None:
        """Note where the stream stands now; events after this call will be delivered."""
        self._after = await self._audits.newest_event(self._run_id)

    async def run(self) -> None:
        """Deliver until cancelled; while Redis is away, try again, and after it has come back say so once."""
        is_out = False
        while True:
            try:
                if is_out:
                    await self._after_outage()
                    is_out = False
                self._after, events = await self._audits.events(
                    self._run_id, after=self._after, block_s=_BLOCK_S
                )
            except UnavailableError as error:
                log.warning("events.unavailable", message=error.message)
                is_out = True
                await asyncio.sleep(_RETRY_S)
                continue
            for event in events:
                self._wakeups.deliver(event)
