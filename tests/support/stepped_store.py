"""An object store in memory whose operations happen one at a time, in an order that the test chooses.

Actors run in threads and stop before each operation until they are given a turn, so a test can put any two
operations of any two actors in any order, kill an actor between two operations (nothing of it runs afterwards
but the computing that is under way), and let a PUT arrive after its caller has given up.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from astraflow_weights.errors import ObjectNotFound, Unavailable
from astraflow_weights.store import ObjectInfo, PutResult

T = TypeVar("T")
_PATIENCE_S = 30.0


class Killed(BaseException):
    """What an operation of a killed actor ends with; nothing catches it."""


class MemoryStore:
    """Keys to bytes. `check` is called after every change, with the key and whether it was deleted."""

    uri = "memory://store"

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.check: Callable[[str, bool], None] = lambda key, deleted: None

    def put_if_absent(self, key: str, data: bytes) -> PutResult:
        """Create."""
        if key in self.objects:
            return PutResult.EXISTS
        self.objects[key] = data
        self.check(key, False)
        return PutResult.CREATED

    def put(self, key: str, data: bytes) -> None:
        """Overwrite."""
        self.objects[key] = data

    def get(self, key: str) -> bytes:
        """Content."""
        if key not in self.objects:
            raise ObjectNotFound(key)
        return self.objects[key]

    def get_range(self, key: str, *, start: int, length: int) -> bytes:
        """Part of the content."""
        return self.get(key)[start : start + length]

    def head(self, key: str) -> ObjectInfo:
        """Size."""
        return ObjectInfo(key=key, size_bytes=len(self.get(key)))

    def list(self, prefix: str, *, after: str = "") -> Iterator[ObjectInfo]:
        """Objects in order, as of one instant."""
        keys = sorted(key for key in self.objects if key.startswith(prefix) and key > after)
        return iter([self.head(key) for key in keys])

    def delete(self, key: str) -> None:
        """Remove."""
        if self.objects.pop(key, None) is not None:
            self.check(key, True)


class Actor:
    """Somebody who works on the store: a thread, and the store as it sees it.

    `lose` says of a key that is to be created whether its answer is lost and it arrives later.
    """

    uri = MemoryStore.uri

    def __init__(self, stage: Stage, name: str, work: Callable[[Actor], object]) -> None:
        self.name = name
        self.done = False
        self.killed = False
        self.waiting = 0
        self.permits = 0
        self.failure: BaseException | None = None
        self.lose: Callable[[str], bool] = lambda key: False
        self._stage = stage
        self._work = work
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)

    def _run(self) -> None:
        try:
            self._work(self)
        except Killed:
            pass
        except BaseException as error:  # noqa: BLE001 - raised by the test's thread
            self.failure = error
        with self._stage.turn:
            self.done = True
            self._stage.turn.notify_all()

    def put_if_absent(self, key: str, data: bytes) -> PutResult:
        """Create, or give up before it arrives."""
        inner = self._stage.store

        def put() -> PutResult | None:
            if self.lose(key):
                self._stage.late.append(lambda: inner.put_if_absent(key, data))
                return None
            return inner.put_if_absent(key, data)

        result = self._on_turn(put)
        if result is None:
            raise Unavailable(f"no answer to the PUT of {key}")
        return result

    def __getattr__(self, name: str) -> Callable[..., Any]:
        operation = getattr(self._stage.store, name)
        return lambda *args, **options: self._on_turn(lambda: operation(*args, **options))

    def _on_turn(self, operation: Callable[[], T]) -> T:
        turn = self._stage.turn
        with turn:
            self.waiting += 1
            turn.notify_all()
            turn.wait_for(lambda: self.permits > 0 or self.killed)
            self.waiting -= 1
            if self.killed:
                raise Killed
            self.permits -= 1
            try:
                return operation()
            finally:
                turn.notify_all()


class Stage:
    """The actors of one test, and whose turn it is."""

    def __init__(self) -> None:
        self.store = MemoryStore()
        self.turn = threading.Condition()
        self.late: list[Callable[[], object]] = []
        """PUTs that were given up by their callers and have not arrived yet."""

    def start(self, name: str, work: Callable[[Actor], object]) -> Actor:
        """Let an actor run up to its first operation."""
        actor = Actor(self, name, work)
        actor.thread.start()
        with self.turn:
            self._settle(actor)
        return actor

    def step(self, actor: Actor) -> bool:
        """One operation of an actor; False when it has ended. Raises what it failed with."""
        with self.turn:
            self._settle(actor)
            if not actor.done:
                actor.permits += 1
                self.turn.notify_all()
                self._settle(actor)
        if actor.failure is not None:
            raise actor.failure
        return not actor.done

    def kill(self, actor: Actor) -> None:
        """Nothing of the actor reaches the store any more."""
        with self.turn:
            actor.killed = True
            self.turn.notify_all()
        actor.thread.join(_PATIENCE_S)
        assert actor.done

    def _settle(self, actor: Actor) -> None:
        ready = lambda: actor.done or (actor.waiting > 0 and actor.permits == 0)  # noqa: E731
        assert self.turn.wait_for(ready, _PATIENCE_S), f"{actor.name} does not reach its next operation"
