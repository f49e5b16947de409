"""Calls find the primary that has a run's slot, however the slots move between two of them that are played here."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from astraflow.errors import AstraflowError, IncompatibleError, UnavailableError
from astraflow_dataflow.store.connection import MovedError
from astraflow_dataflow.store.homes.cluster import Cluster, redis_at
from astraflow_dataflow.store.homes.slots import NUM_SLOTS, slot_of
from astraflow_dataflow.store.keys import RUNS_KEY, Keys

RUN, SLOT = Keys("r"), slot_of(Keys("r").prefix)


@dataclass
class Played:
    """What both primaries know, and what each did: the first has all slots but those that moved."""

    moved: bool | None = False
    """Whether the run is at the second one; None: each says that the other has it."""
    told: bool = False
    """Whether CLUSTER SLOTS says so."""
    away: set[str] = field(default_factory=set)
    is_cluster: bool = True
    opened: list[str] = field(default_factory=list)
    did: list[tuple[str, object]] = field(default_factory=list)

    def slots(self) -> list[object]:
        """The second has the run's slot from when it moved, and the last one always."""
        run_at = 2 if self.told else 1
        parts = [
            (0, SLOT - 1, 1),
            (SLOT, SLOT, run_at),
            (SLOT + 1, NUM_SLOTS - 2, 1),
            (NUM_SLOTS - 1, NUM_SLOTS - 1, 2),
        ]
        return [[first, last, [b"host", port, b"id"]] for first, last, port in parts]


class PlayedPrimary:
    """A primary of the two, or a node that was named."""

    def __init__(self, played: Played, url: str, *, tag: str) -> None:
        self.address, self.tag, self._played = url, tag, played
        self._port = url[-1]

    def _check(self) -> None:
        if self._port in self._played.away:
            raise UnavailableError("away")

    async def open(self) -> None:
        """Check."""
        self._check()
        self._played.opened.append(self._port)

    async def close(self) -> None:
        """Nothing is open."""

    async def info(self, section: str) -> dict[str, str]:
        """What kind it is."""
        self._check()
        return {"cluster_enabled": "1" if self._played.is_cluster else "0"}

    async def raw_many(self, commands: Sequence[object]) -> list[object]:
        """The map."""
        return [b"cluster_current_epoch:1\r\n", self._played.slots()]

    def _of_the_run(self, what: object) -> object:
        self._check()
        if (self._port == "2") is not self._played.moved:
            return MovedError(SLOT, "host:2" if self._played.moved else "host:1")
        self._played.did.append((self._port, what))
        return what

    async def call_many(self, keys: Keys, calls: Sequence[Any]) -> list[object]:
        """The first call that says `move` is the last before the run moves."""
        replies = []
        for call in calls:
            replies.append(self._of_the_run(call))
            if call == "move" and not self._played.moved:
                self._played.moved = self._played.told = True
        return replies

    async def raw(self, *command: object) -> object:
        """A plain command."""
        if isinstance(answer := self._of_the_run(command[0]), AstraflowError):
            raise answer
        return answer

    async def read_stream(self, key: str, **_: object) -> object:
        """A read."""
        return await self.raw("XREAD")


async def opened(played: Played, nodes: str = "host:1") -> Cluster:
    """A cluster of the two."""
    connect: Any = lambda url, *, tag: PlayedPrimary(played, url, tag=tag)  # noqa: E731
    cluster = Cluster(f"redis+cluster://{nodes}", connect)
    await cluster.open()
    return cluster


async def test_calls_after_which_a_slot_moved_are_sent_again_to_where_it_is() -> None:
    played = Played()
    cluster = await opened(played)
    calls: Any = ["a", "move", "b", "c"]
    assert await cluster.call_many(RUN, calls) == calls
    assert played.did == [("1", "a"), ("1", "move"), ("2", "b"), ("2", "c")]
    await cluster.close()


async def test_the_one_that_let_a_slot_go_is_believed_before_the_others_have_heard_of_it() -> None:
    played = Played()
    cluster = await opened(played)
    played.moved = True
    assert await cluster.raw("GET", RUN.of("run")) == "GET"
    assert cluster.home("r").address == "redis://host:2"
    await cluster.close()


async def test_nodes_that_never_agree_are_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("astraflow_dataflow.store.homes.cluster._PAUSE_S", 0)
    played = Played()
    cluster = await opened(played)
    played.moved = None  # neither has it
    with pytest.raises(UnavailableError, match=f"do not agree on who has slot {SLOT}"):
        await cluster.raw("GET", RUN.of("run"))
    await cluster.close()


async def test_a_reader_hears_that_its_stream_moved() -> None:
    played = Played()
    cluster = await opened(played)
    played.moved = played.told = True
    with pytest.raises(UnavailableError, match="looks again"):
        await cluster.read_stream(RUN.of("events"), after="0", block_ms=1, limit=1)
    assert await cluster.read_stream(RUN.of("events"), after="0", block_ms=1, limit=1) == "XREAD"
    await cluster.close()


async def test_a_primary_that_was_away_at_the_start_is_checked_before_it_is_used() -> None:
    played = Played(away={"2"}, moved=True, told=True)
    cluster = await opened(played)
    assert played.opened == ["1"]
    with pytest.raises(UnavailableError, match="away"):
        await cluster.raw("GET", RUN.of("run"))
    played.away.clear()
    await cluster.raw("GET", RUN.of("run"))
    await cluster.raw("GET", RUN.of("run"))
    assert played.opened == ["1", "2"]
    await cluster.close()


async def test_the_first_named_node_that_answers_is_enough_and_the_registry_is_needed() -> None:
    await (await opened(Played(away={"9"}), "host:9,host:2")).close()
    with pytest.raises(UnavailableError, match="away"):
        await opened(Played(away={"1"}), "host:1,host:2")
    with pytest.raises(
        UnavailableError, match=r"no usable node of a Redis cluster at redis\+cluster://host:1: away"
    ):
        await opened(Played(away={"1"}))
    with pytest.raises(IncompatibleError, match="is no node of a cluster"):
        await opened(Played(is_cluster=False))


def test_what_lies_where_is_the_same_for_every_server() -> None:
    assert slot_of(RUNS_KEY) not in (SLOT, NUM_SLOTS - 1)


def test_an_address_says_whether_it_is_of_a_cluster() -> None:
    assert isinstance(redis_at("rediss+cluster://user@a:1,b:2/0?ssl_ca_certs=x"), Cluster)
    assert redis_at("redis://user:secret@a:1/2").address == "redis://a:1/2"
    assert redis_at("redis+cluster://user:secret@a:1,b:2").address == "redis+cluster://a:1,b:2"
