"""What a run's Redis really holds, counted key by key from a copy of its data, past the server's functions.

`take_census` starts a server of its own on the copy, so that an audit cannot change what it looks at.
Used by `support.audit`.
"""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redis

from astraflow_dataflow.store.episodes.pushes import stored_headers
from astraflow_dataflow.store.keys import Keys
from support.valkey import ValkeyServer

_DROPPED = "dropped:"


@dataclass(frozen=True, kw_only=True)
class Consumed:
    """One committed step."""

    step: int
    batch: str
    stage: str
    digest: str
    num_trajectories: int


@dataclass(frozen=True, kw_only=True)
class Census:
    """Trajectory ids by where they are, and the counters beside them."""

    counters: dict[str, int]
    consumed: list[Consumed]
    places: dict[str, set[str]]
    """`assembling`, `ready` and `in_batch`: what is yet to be trained."""
    retained: set[str]
    """Of finished steps whose payloads no durable checkpoint has released."""
    owners: set[str]
    with_payload: set[str]
    expiring: set[str]
    """Ids whose payload has a time to live."""
    orphans: set[str]
    """Payload keys without an owner and without a time to live."""
    announced: dict[int, str]
    """Manifest sha256 (hex) by announced version."""

    @property
    def live(self) -> set[str]:
        """Everything yet to be trained."""
        return set().union(*self.places.values())

    @property
    def dropped(self) -> dict[str, int]:
        """Counted drops by reason."""
        counts = {name: count for name, count in self.counters.items() if name.startswith(_DROPPED)}
        return {name.removeprefix(_DROPPED): count for name, count in counts.items() if count}


def take_census(data: Path, run_id: str, policy: str, *, scratch: Path) -> Census:
    """Count what the Redis data in `data` holds."""
    with _served_copy(data, scratch) as client:
        return _Counter(client, Keys(run_id), policy).census()


@contextmanager
def _served_copy(data: Path, scratch: Path) -> Iterator[redis.Redis]:
    shutil.rmtree(scratch, ignore_errors=True)
    shutil.copytree(data, scratch)
    with ValkeyServer(scratch) as server, redis.Redis(port=server.port) as client:
        yield client


class _Counter:
    def __init__(self, client: redis.Redis, keys: Keys, policy: str) -> None:
        self._client, self._keys, self._policy = client, keys, policy

    def census(self) -> Census:
        owners = {_text(item): _text(episode) for item, episode in self._hash("owners").items()}
        payloads = self._payloads()
        stored = {f"{episode}:{item}": item for item, episode in owners.items()}
        in_batch, retained = self._bound()
        versions = self._hash("versions", self._policy)
        return Census(
            counters={_text(name): int(value) for name, value in self._hash("counters").items()},
            consumed=self._consumed(),
            places={"assembling": self._assembling(), "ready": self._ready(), "in_batch": in_batch},
            retained=retained,
            owners=set(owners),
            with_payload={item for name, item in stored.items() if name in payloads},
            expiring={item for name, item in stored.items() if payloads.get(name, -1) >= 0},
            orphans={name for name, ttl in payloads.items() if name not in stored and ttl < 0},
            announced={int(number): _text(body.split(b" ", 2)[1]) for number, body in versions.items()},
        )

    def _hash(self, kind: str, *parts: str) -> dict[bytes, bytes]:
        found: Any = self._client.hgetall(self._keys.of(kind, *parts))
        return dict(found)

    def _payloads(self) -> dict[str, int]:
        """Time to live in ms (-1: none) by `episode:trajectory`."""
        prefix = self._keys.of("payload", "", "").removesuffix(":")
        names = [_text(key) for key in self._client.scan_iter(match=f"{_escaped(prefix)}*", count=1000)]
        with self._client.pipeline(transaction=False) as pipeline:
            for name in names:
                pipeline.pttl(name)
            ttls = pipeline.execute()
        return {name.removeprefix(prefix): int(ttl) for name, ttl in zip(names, ttls, strict=True)}

    def _consumed(self) -> list[Consumed]:
        entries: Any = self._client.xrange(self._keys.of("consumed", self._policy))
        return [
            Consumed(
                step=int(fields[b"step"]),
                batch=_text(fields[b"batch"]),
                stage=_text(fields[b"stage"]),
                # The server keeps digests as bytes, the ledger as hex.
                digest=fields[b"digest"].hex(),
                num_trajectories=int(fields[b"n"]),
            )
            for _, fields in entries
        ]

    def _assembling(self) -> set[str]:
        found: set[str] = set()
        for index in ("open", "settling"):
            tasks: Any = self._client.zrange(self._keys.of(index), 0, -1)
            for task in tasks:
                held: Any = self._client.lrange(self._keys.of("members", _text(task)), 0, -1)
                found |= {header.trajectory_id for header in stored_headers(held)}
        return found

    def _ready(self) -> set[str]:
        groups: Any = self._client.zrange(self._keys.of("ready", self._policy), 0, -1)
        return {item for group in groups for item in self._ids(_text(group))}

    def _bound(self) -> tuple[set[str], set[str]]:
        in_batch: set[str] = set()
        retained: set[str] = set()
        for batch in self._hash("steps", self._policy).values():
            stored = self._hash("batch", _text(batch))
            unfinished = stored.get(b"stage", b"") in (b"", b"intent")
            for group in _text(stored.get(b"groups", b"")).splitlines():
                (in_batch if unfinished else retained).update(self._ids(group))
        return in_batch, retained

    def _ids(self, group: str) -> list[str]:
        return _text(self._hash("group", group).get(b"ids", b"")).splitlines()


def _text(value: bytes) -> str:
    return value.decode()


def _escaped(pattern: str) -> str:
    return pattern.replace("[", "\\[").replace("{", "\\{")
