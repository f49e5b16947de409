"""`astraflow weights rollback` with a real server: once, announced, whenever it dies; never against a live trainer."""

import asyncio
from dataclasses import dataclass
from pathlib import Path

import pytest

from astraflow.dataflow.v1 import version_pb2, version_service_pb2
from astraflow.dataflow.v1.batch_service_pb2 import BATCH_STAGE_TRAINED as TRAINED
from astraflow.errors import FencedError
from astraflow_weights.store.file import FileStore
from astraflow_weights.versions.log import VersionLog
from support import cli, store_census
from support.cli import Ended
from support.dataflow_world import Trainer, World
from support.published_models import ModelPublisher, open_writer, publish_all, read_log, steps
from support.weight_fixtures import Ask, ask_server
from support.weight_models import POLICY, RUN

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("quiet")]


@dataclass
class Started:
    """A run with versions 0 to 2 of a trainer that has ended, and the store they are in."""

    world: World
    store: FileStore
    trainer: Trainer

    async def rollback(self, version: int, *options: str) -> Ended:
        """Run the command."""
        return await ask_server(self.world, "rollback", str(version), *options)

    async def announced(self) -> list[version_pb2.Version]:
        """What nodes may activate, newest first."""
        reply = await self.world.ask(version_service_pb2.ListVersionsResponse, policy_id=POLICY)
        return list(reply.versions)

    def log(self) -> VersionLog:
        """The log as it is now."""
        return read_log(self.store)


@pytest.fixture
async def started(world: World, weight_store: FileStore) -> Started:
    """Publish three versions and end the trainer."""
    await world.create_run(name=RUN, store_uri=weight_store.uri, dataset="Counting")
    trainer, node = await world.trainer(publish_first=False), await world.node()
    publisher = ModelPublisher(open_writer(weight_store, epoch=trainer.epoch))
    for committed in publish_all(publisher, steps(3, density=0.005)):
        if step := committed.step:
            await node.work(2)
            await trainer.ack((await trainer.acquire(step, base_version=step - 1)).batch, TRAINED)
        await trainer.publish(version=committed.version, step=step, content=committed.manifest_sha256)
    await trainer.release()
    return Started(world, weight_store, trainer)


async def test_going_back_makes_and_announces_one_version(started: Started) -> None:
    told = await started.rollback(0, "--json")
    assert told.status == 0, told.errors
    record = started.log().record(3)
    made = {"rollback_of": 0, "version": 3, "made": True, "announced": True}
    assert told.json == made | {"size_bytes": record.delta_bytes + record.snapshot_bytes}
    newest = (await started.announced())[0]
    assert (newest.version, newest.rollback_of, newest.step) == (3, 0, 2)
    assert newest.manifest_sha256 == record.manifest_sha256
    again = await started.rollback(0)
    assert "version 3, the newest one, has the weights of version 0 already; nothing to do" in again.output
    assert "version 3 is the newest one; nothing to do" in (await started.rollback(3)).output
    assert len(started.log().records) == 4
    row = (await ask_server(started.world, "list", "--json")).json[0]
    assert (row["version"], row["rollback_of"], row["step"]) == (3, 0, 2)
    shown = await ask_server(started.world, "show", "3")
    assert "version 0" in shown.output


async def test_a_trainer_claims_at_once_after_going_back(started: Started) -> None:
    told = await started.rollback(1)
    assert told.status == 0, told.errors
    claim = await started.trainer.claim()
    assert claim.version == 3
    await started.trainer.hold()


async def test_a_live_trainer_is_named_and_left_alone(started: Started) -> None:
    await started.trainer.claim(trainer_id="host:1:abcd")
    refused = await started.rollback(0)
    assert refused.status == 1
    holder = ("held by trainer host:1:abcd", "0 s ago")
    for words in (*holder, "stop that trainer", "--take-over", "StopAfterStep"):
        assert words in refused.errors
    await started.trainer.hold()
    assert len(started.log().records) == 3


async def test_taking_over_fences_the_trainer(started: Started) -> None:
    await started.trainer.claim()
    assert (await started.rollback(0, "--take-over")).status == 0
    with pytest.raises(FencedError, match="not the current one"):
        await started.trainer.hold()


async def test_without_a_server_the_next_trainer_announces_it(started: Started, ask: Ask) -> None:
    refused = ask("rollback", "0")
    assert (refused.status, "nobody can say whether a trainer still writes" in refused.errors) == (2, True)
    told = ask("rollback", "0", "--take-over")
    assert told.status == 0, told.errors
    assert "the next trainer announces it" in told.output
    again = ask("rollback", "0", "--take-over", "--json")
    assert (again.status, again.json["made"], again.json["announced"]) == (0, False, False)
    assert len(await started.announced()) == 3
    owner = started.log().owner
    assert owner is not None
    successor = Trainer(world=started.world, policy_id=POLICY)
    await successor.claim(known_epoch=owner.epoch)
    record = started.log().record(3)
    await successor.publish(
        version=3, step=2, content=record.manifest_sha256, writer_epoch=record.writer_epoch, rollback_of=0
    )
    assert (await started.announced())[0].version == 3


async def test_an_unknown_version_is_refused(started: Started) -> None:
    refused = await started.rollback(9)
    assert (refused.status, "it holds 0 to 2" in refused.errors) == (2, True)


async def test_a_version_that_is_gone_is_refused_with_the_advice_to_pin(started: Started) -> None:
    for part in started.log().record(1).deltas[0].parts:
        started.store.delete(part.key)
    refused = await started.rollback(0)
    assert refused.status == 1
    assert "pin versions that you may want back" in refused.errors
    assert len(started.log().records) == 3


MOMENTS = [
    "weights.publish.uploading",
    "weights.publish.after_manifest",
    pytest.param("weights.publish.before_manifest", marks=pytest.mark.ci),
    pytest.param("weights.compaction.visible", marks=pytest.mark.ci),
]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("moment", MOMENTS)
async def test_killed_at_any_moment_and_called_again_there_is_one_version(
    started: Started, tmp_path: Path, moment: str
) -> None:
    arguments = ["weights", "rollback", "0", "--join", started.world.address]
    hits = await asyncio.to_thread(
        cli.run_killed, *arguments, failpoint=f"{moment}=kill@1", log=tmp_path / "hits.jsonl"
    )
    assert [hit.name for hit in hits] == [moment]
    told = await started.rollback(0, "--json")
    assert (told.status, told.json["version"], told.json["announced"]) == (0, 3, True), told.errors
    census = store_census.take(started.store, run_id=RUN, policy_id=POLICY)
    assert census.steps == [0, 1, 2, 2]
    assert census.records[3].model_root == census.records[0].model_root
    assert [version.version for version in await started.announced()] == [3, 2, 1, 0]
