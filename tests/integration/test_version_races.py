"""Writers that race for one policy's log: each number has one winner, and epochs never fall for readers.

Every writer claims its epoch from a real dataflow server, fences and publishes in a thread of its own over one file
store, is held up at random places, and announces what it committed. The seed decides the holds, not the outcome.
"""

import asyncio
import copy
import random
import shutil
import threading
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from astraflow.client import Client
from astraflow.dataflow.v1 import version_pb2, version_service_pb2
from astraflow.dataflow.v1.batch_service_pb2 import ClaimPolicyRequest
from astraflow.errors import ConflictError, FencedError, InvalidArgumentError
from astraflow_weights.errors import Fenced
from astraflow_weights.mirror.mirror import Mirror
from astraflow_weights.publish.version_writer import CommittedVersion, VersionWriter
from astraflow_weights.store import ObjectStore, PutResult
from astraflow_weights.store.file import FileStore
from support import store_census
from support.dataflow_world import World
from support.published_models import ModelPublisher
from support.trainer_process import valkey
from support.weight_models import POLICY, make_model, trained

__all__ = ["valkey"]

NUM_WRITERS, VERSIONS_EACH = 3, 3


class HeldStore(FileStore):
    """A file store whose writes are held up for a drawn moment: a frozen process between any two of them."""

    def __init__(self, root: Path, draw: random.Random) -> None:
        super().__init__(root)
        self._draw = draw

    def put_if_absent(self, key: str, data: bytes) -> PutResult:
        """Create, after a while."""
        if self._draw.random() < 0.3:
            time.sleep(self._draw.random() * 0.01)
        return super().put_if_absent(key, data)


@dataclass
class Writer:
    """One trainer as far as versions go."""

    name: str
    client: Client
    run_id: str
    store: ObjectStore
    folder: Path
    draw: random.Random
    committed: list[CommittedVersion] = field(default_factory=list)
    announced: list[int] = field(default_factory=list)
    epoch: int = 0
    was_replaced: bool = False

    def live(self, start: threading.Barrier) -> None:
        """Claim, fence and publish until done or replaced."""
        start.wait()
        time.sleep(self.draw.random() * 0.03)
        try:
            self._publish_all()
        except (Fenced, FencedError, ConflictError):
            # By the store, the server, or the log: between its fence and its first look at what it builds upon.
            self.was_replaced = True

    def _publish_all(self) -> None:
        claim = ClaimPolicyRequest(run_id=self.run_id, policy_id=POLICY, trainer_id=self.name)
        claimed = self.client.call(self.client.batches.ClaimPolicy, claim)
        self.client.session, self.epoch = claimed.session, claimed.trainer_epoch
        writer = VersionWriter.open(self.store, run_id=self.run_id, policy_id=POLICY, epoch=self.epoch)
        newest, base = writer.log.latest(), None
        if newest is not None:
            mirror = Mirror(self.folder / self.name)
            mirror.advance(self.store, writer.log, target=newest.version)
            base = mirror.load()
        publisher = ModelPublisher(writer, base=base)
        model = base or make_model()
        for _ in range(VERSIONS_EACH):
            model = trained(model, self.draw.randrange(1 << 30), density=0.2)
            self.committed.append(publisher.publish(model, step=len(writer.log.records)))
            self._announce(publisher.committed_since(None))

    def _announce(self, versions: list[CommittedVersion]) -> None:
        for item in versions[len(self.announced) :]:
            same = {name: getattr(item, name) for name in ("version", "sequence", "manifest_sha256", "step")}
            version = version_pb2.Version(policy_id=POLICY, trainer_epoch=item.writer_epoch, **same)
            request = version_service_pb2.PublishRequest(
                run_id=self.run_id, version=version, trainer_epoch=self.epoch
            )
            try:
                self.client.call(self.client.versions.Publish, request)
            except InvalidArgumentError as error:
                # No step is acked here: the server takes version 0 and what older epochs made.
                if "is not finished" not in error.message:
                    raise
                return
            self.announced.append(item.version)


@pytest.fixture
async def client(world: World) -> AsyncIterator[Client]:
    """A blocking client, as trainers have one."""
    with Client(world.address) as client:
        yield client


async def race(world: World, client: Client, folder: Path, *, seed: int) -> bool:
    """Let the writers of one race live; returns whether any was replaced."""
    await world.create_run(name=f"race-{seed}")
    draws = random.Random(seed)
    root = folder / f"store-{seed}"
    writers = [
        Writer(
            name=f"writer-{index}",
            client=copy.copy(client),
            run_id=world.run_id,
            store=HeldStore(root, random.Random(draws.random())),
            folder=folder / f"mirrors-{seed}",
            draw=random.Random(draws.random()),
        )
        for index in range(NUM_WRITERS)
    ]
    start = threading.Barrier(NUM_WRITERS)
    with ThreadPoolExecutor(NUM_WRITERS) as executor:
        for living in [executor.submit(writer.live, start) for writer in writers]:
            await asyncio.wrap_future(living)
    check(writers, store_census.take(FileStore(root), run_id=world.run_id, policy_id=POLICY))
    return any(writer.was_replaced for writer in writers)


def check(writers: list[Writer], census: store_census.Census) -> None:
    """One winner per number, nothing lost of what was won, and the newest epoch done."""
    assert len({writer.epoch for writer in writers}) == NUM_WRITERS
    won = [item for writer in writers for item in writer.committed]
    assert len({item.version for item in won}) == len(won), "a number was won twice"
    there = {(record.version, record.manifest_sha256) for record in census.records}
    assert {(item.version, item.manifest_sha256) for item in won} <= there
    last = max(writers, key=lambda writer: writer.epoch)
    assert not last.was_replaced
    assert census.epochs[-1] == last.epoch
    assert any(writer.announced for writer in writers), "version 0 at least"


@pytest.mark.slow
async def test_each_number_has_one_winner_whoever_is_held_up_where(
    world: World, client: Client, tmp_path: Path
) -> None:
    replaced = [await race(world, client, tmp_path, seed=seed) for seed in range(8)]
    assert any(replaced), "nobody was replaced: no race"


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("batch", range(20))
async def test_a_thousand_races(world: World, client: Client, tmp_path: Path, batch: int) -> None:
    """In batches of fifty, each with a server of its own: active runs share its connections to Redis."""
    replaced = []
    for seed in range(1000 + 50 * batch, 1050 + 50 * batch):
        folder = tmp_path / str(seed)
        folder.mkdir()
        replaced.append(await race(world, client, folder, seed=seed))
        shutil.rmtree(folder)
    assert any(replaced), "nobody was replaced: no race"
