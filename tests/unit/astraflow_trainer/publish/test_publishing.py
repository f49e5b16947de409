"""Versions leave in order beside training, are committed before announced, and failures reach the trainer."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from astraflow.errors import FencedError, InvalidArgumentError, UnavailableError
from astraflow_trainer.publish.publishing import Announcer, ModelBytes, PublishWorker
from astraflow_weights.codec.parts.writer import Placed
from astraflow_weights.codec.peers import OnePeer
from astraflow_weights.codec.shards import ShardedModel, whole
from astraflow_weights.codec.snapshot import encode_snapshot_tiles
from astraflow_weights.publish import shard_publisher
from astraflow_weights.publish.shard_publisher import ShardPublisher
from astraflow_weights.publish.version_writer import CommittedVersion, VersionWriter
from astraflow_weights.store import PutResult
from astraflow_weights.store.file import FileStore
from support.published_models import committed
from support.scripted_batches import PATIENCE_S, ScriptedBatches, eventually, serving
from support.scripted_dataflow import POLICY, RUN_ID

FENCED = FencedError("a newer writer holds the log")
SHARDS = whole({"weight": np.zeros(2, dtype=np.uint16)})
MODEL = ModelBytes(open=lambda: SHARDS)
VERSION = committed(
    7, sequence=3, step=2, manifest_sha256=b"\2" * 32, snapshot_bytes=40, delta_bytes=10, num_changed=1
)


@dataclass
class Store:
    """Commits at once, or when its gate opens; fails as told."""

    events: list[str]
    gate: threading.Event = field(default_factory=threading.Event)
    failures: deque[Exception] = field(default_factory=deque)
    learning_rates: list[float | None] = field(default_factory=list)
    log: list[CommittedVersion] = field(default_factory=list)

    def committed_since(self, version: int | None) -> list[CommittedVersion]:
        return [item for item in self.log if version is None or item.version > version]

    def publish(
        self, model: ShardedModel, *, step: int, learning_rate: float | None = None
    ) -> CommittedVersion:
        assert self.gate.wait(PATIENCE_S)
        assert model is SHARDS
        if self.failures:
            raise self.failures.popleft()
        self.learning_rates.append(learning_rate)
        self.events.append(f"publish {step}")
        self.log.append(committed(step))
        return self.log[-1]


@dataclass
class Bench:
    """A worker between a scripted store and a scripted server."""

    script: ScriptedBatches
    store: Store
    worker: PublishWorker
    published: list[int]


@contextmanager
def _bench(*, max_behind: int = 1, open_gate: bool = True) -> Iterator[Bench]:
    script = ScriptedBatches()
    store = Store(script.events)
    published: list[int] = []
    if open_gate:
        store.gate.set()
    with serving(script) as client:
        announcer = Announcer(client, run_id=RUN_ID, policy_id=POLICY, epoch=3)
        worker = PublishWorker(
            store,
            announcer,
            policy_id=POLICY,
            max_behind=max_behind,
            published=lambda version: published.append(version.version),
        )
        try:
            yield Bench(script, store, worker, published)
        finally:
            store.gate.set()


def test_an_announcement_carries_what_nodes_verify_and_operators_read() -> None:
    script = ScriptedBatches()
    with serving(script) as client:
        announcer = Announcer(client, run_id=RUN_ID, policy_id=POLICY, epoch=4)
        announcer.announce_missing(Store(script.events, log=[VERSION]))
    assert script.epochs == {4}
    (version,) = script.announced
    assert (version.policy_id, version.version, version.sequence, version.step) == (POLICY, 7, 3, 2)
    assert (version.manifest_sha256, version.trainer_epoch) == (b"\2" * 32, 3)
    assert (version.snapshot_bytes, version.delta_bytes, version.density) == (40, 10, 0.25)


def test_versions_are_committed_then_announced_in_the_order_of_their_steps() -> None:
    with _bench() as bench, bench.worker as worker:
        worker.submit(1, MODEL, learning_rate=0.5)
        worker.submit(2, MODEL)
        worker.wait_until_done()
        assert bench.script.events == ["publish 1", "announce 1", "publish 2", "announce 2"]
        assert bench.published == [1, 2]
        assert bench.store.learning_rates == [0.5, None]


def test_submitting_does_not_wait_for_the_store() -> None:
    with _bench(open_gate=False) as bench, bench.worker as worker:
        for step in (1, 2, 3):
            worker.submit(step, MODEL)
        assert bench.script.events == []
        bench.store.gate.set()


class StalledStore(FileStore):
    """Takes parts only once its gate is open, and notes who brought them."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.gate = threading.Event()
        self.arrived = threading.Event()
        self.threads: set[str] = set()

    def put_if_absent(self, key: str, data: bytes) -> PutResult:
        if key.endswith(".afwd"):
            self.threads.add(threading.current_thread().name.split("_")[0])
            self.arrived.set()
            assert self.gate.wait(PATIENCE_S)
        return super().put_if_absent(key, data)


def test_the_training_thread_neither_opens_nor_encodes_nor_uploads_what_it_submits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = StalledStore(tmp_path)
    encoders: list[str] = []
    openers: list[str] = []

    def encode(*args: ShardedModel) -> Iterator[Placed]:
        encoders.append(threading.current_thread().name)
        return encode_snapshot_tiles(*args)

    def opened() -> ShardedModel:
        openers.append(threading.current_thread().name)
        return SHARDS

    monkeypatch.setattr(shard_publisher, "encode_snapshot_tiles", encode)
    roots: list[bytes] = []
    writer = VersionWriter.open(store, run_id="r", policy_id="p", epoch=1)
    publisher = ShardPublisher(writer, uploads=writer.uploads, peers=OnePeer(), base=None)
    worker = PublishWorker(publisher, None, policy_id="p", max_behind=0, published=lambda _: None)
    with worker:
        worker.submit(0, ModelBytes(open=opened, published=roots.append))
        # This thread is past the submission while the upload stands still.
        assert store.arrived.wait(PATIENCE_S)
        assert roots == []
        store.gate.set()
        worker.wait_until_done()
    newest = publisher.newest
    assert newest is not None
    assert roots == [newest.model_root]
    assert (openers, encoders, store.threads) == (["publish"], ["publish"], {"weights-upload"})


def test_there_is_room_while_at_most_max_behind_versions_are_unpublished() -> None:
    waits: list[str] = []
    with _bench(max_behind=2, open_gate=False) as bench, bench.worker as worker:
        worker.submit(1, MODEL)
        worker.submit(2, MODEL)
        worker.wait_for_room(waiting=lambda: waits.append("two behind"))
        assert waits == []
        worker.submit(3, MODEL)

        def open_gate() -> None:
            waits.append("three behind")
            bench.store.gate.set()

        worker.wait_for_room(waiting=open_gate)
        assert waits[0] == "three behind"
        assert "announce 1" in bench.script.events


def test_leaving_waits_for_what_is_queued() -> None:
    with _bench() as bench:
        with bench.worker as worker:
            worker.submit(1, MODEL)
            worker.submit(2, MODEL)
        assert bench.published == [1, 2]


def test_a_store_that_cannot_answer_now_is_asked_again() -> None:
    with _bench() as bench, bench.worker as worker:
        bench.store.failures.append(UnavailableError("store restarts"))
        worker.submit(1, MODEL)
        worker.wait_until_done()
        assert bench.script.events == ["publish 1", "announce 1"]


def _publish_all(worker: PublishWorker, *, steps: int) -> None:
    with worker:
        for step in range(1, steps + 1):
            worker.submit(step, MODEL)
        worker.wait_until_done()


def test_a_version_that_is_not_committed_is_not_announced_and_ends_the_trainer() -> None:
    with _bench() as bench:
        bench.store.failures.append(FENCED)
        with pytest.raises(FencedError, match="newer writer"):
            _publish_all(bench.worker, steps=2)
        assert bench.script.events == []
        assert bench.published == []


def test_a_refused_announcement_ends_the_trainer_and_is_not_reported_as_published() -> None:
    with _bench() as bench:
        bench.script.fail("Publish", InvalidArgumentError("version 1 is already step 9's"))
        with pytest.raises(InvalidArgumentError, match="already step 9's"):
            _publish_all(bench.worker, steps=1)
        assert bench.script.events == ["publish 1"]
        assert bench.published == []


def test_after_a_failure_every_call_raises_it() -> None:
    with _bench(max_behind=5) as bench:
        bench.store.failures.append(FENCED)
        with pytest.raises(FencedError):
            _publish_all(bench.worker, steps=1)
        with pytest.raises(FencedError):
            bench.worker.submit(2, MODEL)
        with pytest.raises(FencedError):
            bench.worker.wait_for_room(waiting=lambda: None)
        with pytest.raises(FencedError):
            bench.worker.wait_until_done()


def test_a_failure_nobody_asked_about_is_raised_on_leaving() -> None:
    with _bench() as bench:
        bench.store.failures.append(FENCED)

        def submit_and_leave() -> None:
            with bench.worker as worker:
                worker.submit(1, MODEL)

        with pytest.raises(FencedError):
            submit_and_leave()


def test_leaving_with_an_error_does_not_wait_for_the_store() -> None:
    with _bench(open_gate=False) as bench:

        def submit_and_fail() -> None:
            with bench.worker as worker:
                worker.submit(1, MODEL)
                raise KeyError("training failed")

        with pytest.raises(KeyError, match="training failed"):
            submit_and_fail()
        assert bench.published == []
        bench.store.gate.set()
        eventually(lambda: bench.published == [1], what="the worker's thread to finish")


def test_versions_that_the_server_forgot_are_announced_before_the_next_one() -> None:
    with _bench() as bench, bench.worker as worker:
        for step in (1, 2):
            worker.submit(step, MODEL)
        worker.wait_until_done()
        del bench.script.announced[-1]
        worker.submit(3, MODEL)
        worker.wait_until_done()
        assert [version.version for version in bench.script.announced] == [1, 2, 3]


def test_what_the_server_forgot_is_announced_while_nothing_is_published() -> None:
    with _bench() as bench, bench.worker as worker:
        worker.submit(1, MODEL)
        worker.wait_until_done()
        worker.announce_again()
        worker.wait_until_done()
        assert len(bench.script.announced) == 1
        bench.script.announced.clear()
        worker.announce_again()
        worker.wait_until_done()
        assert [version.version for version in bench.script.announced] == [1]


def test_a_server_that_is_away_is_told_when_it_is_back() -> None:
    with _bench() as bench, bench.worker as worker:
        # More refusals than the client repeats a call for.
        bench.script.fail("ListVersions", *[UnavailableError("restarts", retry_after_s=20.0)] * 2)
        worker.submit(1, MODEL)
        worker.wait_until_done()
        assert bench.script.events == ["publish 1", "announce 1"]
