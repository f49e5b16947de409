"""Versions leave in order beside training, are committed before announced, and failures reach the trainer."""

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from astraflow.client import Client
from astraflow.errors import FencedError, InvalidArgumentError, UnavailableError
from astraflow_trainer.publish.publishing import ModelBytes, PublishWorker
from astraflow_weights.codec.peers import OnePeer
from astraflow_weights.codec.snapshot import encode_snapshot_tiles
from astraflow_weights.publish import shard_publisher, version_writer
from astraflow_weights.publish.announcing import Announcer
from astraflow_weights.store import PutResult, file
from support import published_models, scripted_batches
from support.scripted_dataflow import POLICY, RUN_ID

FENCED = FencedError("a newer writer holds the log")


@dataclass
class Bench:
    """Workers between a scripted store and a scripted server."""

    client: Client
    script: scripted_batches.ScriptedBatches
    store: scripted_batches.ScriptedStore
    published: list[int] = field(default_factory=list)

    def announcer(self, *, epoch: int = 3) -> Announcer:
        return Announcer(self.client, run_id=RUN_ID, policy_id=POLICY, epoch=epoch)

    def worker(self, *, max_behind: int = 1) -> PublishWorker:
        return PublishWorker(
            self.store,
            self.announcer(),
            policy_id=POLICY,
            max_behind=max_behind,
            published=lambda version: self.published.append(version.version),
        )

    def announced(self) -> list[int]:
        return [version.version for version in self.script.announced]


def publish_all(worker: PublishWorker, *steps: int) -> None:
    """Submit these steps and wait for them."""
    with worker:
        submit(worker, *steps)
        worker.wait_until_done()


def submit(worker: PublishWorker, *steps: int) -> None:
    for step in steps:
        worker.submit(step, scripted_batches.weights_of(step))


@pytest.fixture
def bench() -> Iterator[Bench]:
    script = scripted_batches.ScriptedBatches()
    with scripted_batches.serving(script) as client:
        bench = Bench(client, script, scripted_batches.ScriptedStore(script.events))
        yield bench
        bench.store.gate.set()


def test_an_announcement_carries_what_nodes_verify_and_operators_read(bench: Bench) -> None:
    digest = b"\2" * 32
    sizes = {"snapshot_bytes": 40, "delta_bytes": 10, "num_changed": 1}
    bench.store.log.append(published_models.committed(7, sequence=3, step=2, manifest_sha256=digest, **sizes))
    bench.announcer(epoch=4).announce_missing(bench.store)
    assert bench.script.epochs == {4}
    (version,) = bench.script.announced
    assert (version.policy_id, version.version, version.sequence, version.step) == (POLICY, 7, 3, 2)
    assert (version.manifest_sha256, version.trainer_epoch) == (digest, 3)
    assert (version.snapshot_bytes, version.delta_bytes, version.density) == (40, 10, 0.25)


def test_versions_are_committed_then_announced_in_the_order_of_their_steps(bench: Bench) -> None:
    with bench.worker() as worker:
        worker.submit(1, scripted_batches.weights_of(1), learning_rate=0.5)
        submit(worker, 2)
        worker.wait_until_done()
        assert bench.script.events == ["publish 1", "announce 1", "publish 2", "announce 2"]
        assert bench.published == [1, 2]
        assert bench.store.learning_rates == [0.5, None]


class StalledStore(file.FileStore):
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
            assert self.gate.wait(scripted_batches.PATIENCE_S)
        return super().put_if_absent(key, data)


def test_training_neither_opens_encodes_nor_uploads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = StalledStore(tmp_path)
    seen: list[tuple[str, str]] = []

    def noting(what: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: object, **options: object) -> Any:
            seen.append((what, threading.current_thread().name))
            return call(*args, **options)

        return noted

    monkeypatch.setattr(shard_publisher, "encode_snapshot_tiles", noting("encode", encode_snapshot_tiles))
    opened = noting("open", scripted_batches.weights_of(0).open)
    roots: list[bytes] = []
    writer = version_writer.VersionWriter.open(store, run_id="r", policy_id="p", epoch=1)
    publisher = shard_publisher.ShardPublisher(writer, uploads=writer.uploads, peers=OnePeer(), base=None)
    worker = PublishWorker(publisher, None, policy_id="p", max_behind=0, published=lambda _: None)
    with worker:
        worker.submit(0, ModelBytes(open=opened, published=roots.append))
        # This thread is past the submission while the upload stands still.
        assert store.arrived.wait(scripted_batches.PATIENCE_S)
        assert roots == []
        store.gate.set()
        worker.wait_until_done()
    newest = publisher.newest
    assert newest is not None
    assert roots == [newest.model_root]
    assert (seen, store.threads) == ([("open", "publish"), ("encode", "publish")], {"weights-upload"})


def test_leaving_waits_for_what_is_queued(bench: Bench) -> None:
    with bench.worker() as worker:
        submit(worker, 1, 2)
    assert bench.published == [1, 2]


def test_a_store_that_cannot_answer_now_is_asked_again(bench: Bench) -> None:
    bench.store.failures.append(UnavailableError("store restarts"))
    publish_all(bench.worker(), 1)
    assert bench.script.events == ["publish 1", "announce 1"]


def test_a_refused_announcement_ends_the_trainer_and_is_not_reported_as_published(bench: Bench) -> None:
    bench.script.fail("Publish", InvalidArgumentError("version 1 is already step 9's"))
    with pytest.raises(InvalidArgumentError, match="already step 9's"):
        publish_all(bench.worker(), 1)
    assert (bench.script.events, bench.published) == (["publish 1"], [])


def test_after_a_failure_every_call_raises_it(bench: Bench) -> None:
    bench.store.failures.append(FENCED)
    worker = bench.worker(max_behind=5)
    with pytest.raises(FencedError):
        publish_all(worker, 1)
    room = partial(worker.wait_for_room, waiting=lambda: None)
    for call in (partial(submit, worker, 2), room, worker.wait_until_done):
        with pytest.raises(FencedError):
            call()


def test_a_failure_nobody_asked_about_is_raised_on_leaving(bench: Bench) -> None:
    bench.store.failures.append(FENCED)
    with pytest.raises(FencedError), bench.worker() as worker:
        submit(worker, 1)


def test_leaving_with_an_error_does_not_wait_for_the_store(bench: Bench) -> None:
    bench.store.gate.clear()

    def submit_and_fail() -> None:
        with bench.worker() as worker:
            submit(worker, 1)
            raise KeyError("training failed")

    with pytest.raises(KeyError, match="training failed"):
        submit_and_fail()
    assert bench.published == []
    bench.store.gate.set()
    scripted_batches.eventually(lambda: bench.published == [1], what="the worker's thread to finish")


def test_versions_that_the_server_forgot_are_announced_before_the_next_one(bench: Bench) -> None:
    with bench.worker() as worker:
        submit(worker, 1, 2)
        worker.wait_until_done()
        del bench.script.announced[-1]
        submit(worker, 3)
        worker.wait_until_done()
        assert bench.announced() == [1, 2, 3]


def test_what_the_server_forgot_is_announced_while_nothing_is_published(bench: Bench) -> None:
    with bench.worker() as worker:
        submit(worker, 1)
        worker.wait_until_done()
        worker.announce_again()
        worker.wait_until_done()
        assert bench.announced() == [1]
        bench.script.announced.clear()
        worker.announce_again()
        worker.wait_until_done()
        assert bench.announced() == [1]


def test_a_server_that_is_away_is_told_when_it_is_back(bench: Bench) -> None:
    bench.script.fail("ListVersions", *[UnavailableError("restarts", retry_after_s=0.01)] * 3)
    publish_all(bench.worker(), 1)
    assert bench.script.events == ["publish 1", "announce 1"]
