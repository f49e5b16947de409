"""The archive of a run, from the functions of Redis to the rpcs: what is kept, once, also when something fails."""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from uuid import uuid4

import pytest
from redis import Redis

from astraflow.dataflow.v1 import batch_service_pb2 as batches
from astraflow.dataflow.v1 import run_service_pb2 as runs
from astraflow.dataflow.v1 import sample_service_pb2 as pb
from astraflow.errors import NotFoundError, PreconditionError
from astraflow.recipe.dataflow import ArchiveSettings
from astraflow.rollout.v1.trajectory_pb2 import Trajectory
from astraflow_dataflow.runs import registry
from astraflow_dataflow.settings import DataflowServerSettings
from astraflow_dataflow.store.keys import Keys
from astraflow_kit.failpoints import read_hits
from support.cli import Ended, run
from support.dataflow_process import DataflowProcess
from support.dataflow_world import Node, Trainer, World, served
from support.s3_server import S3Server

pytestmark = pytest.mark.integration

ALL = "{write_every_s: 0.1}"
LONG = ("trainer.tokens_per_microbatch=65536",)
"""So that trajectories may be long enough to fill what may wait."""


@pytest.fixture
def store_uri(tmp_path: Path) -> str:
    return (tmp_path / "objects").as_uri()


async def begun(world: World, store_uri: str, archive: str, **recipe: object) -> tuple[Trainer, Node]:
    """A run with an archive, its trainer and a node."""
    await world.create_run(store_uri=store_uri, archive=archive, dataset="Unevaluated", **recipe)
    return await world.trainer(), await world.node()


async def trained(trainer: Trainer, node: Node, step: int) -> list[str]:
    """Train a step and make it durable; returns its trajectories."""
    await node.make_ready(2, version=step - 1)
    batch = await trainer.train(step, base_version=step - 1)
    await trainer.mark_durable(step)
    return [item.trajectory_id for item in batch.items]


async def samples(world: World, **wanted: object) -> dict[str, str]:
    """Every sample of the archive: trajectory and why it ended; asserts that none is there twice."""
    found: list[tuple[str, str]] = []
    token = ""
    while True:
        page = await world.ask(pb.ListSamplesResponse, page_size=3, page_token=token, timeout_s=60, **wanted)
        found += [(sample.item.trajectory_id, sample.reason) for sample in page.samples]
        token = page.next_page_token
        if not token:
            assert len(dict(found)) == len(found), found
            return dict(found)


async def written(world: World, count: int) -> None:
    """Wait until so many trajectories are in the archive and none waits."""
    await world.until(lambda now: (now.archive.written, now.archive.waiting) == (count, 0))


async def test_what_was_trained_and_what_was_dropped_is_kept_once(world: World, store_uri: str) -> None:
    trainer, node = await begun(world, store_uri, ALL, max_staleness=4)
    ids = [*await trained(trainer, node, 1), *await trained(trainer, node, 2)]
    (lease,) = await node.lease(1)
    await node.push(node.episode(lease, 0, version=2))
    late = node.episode(lease, 0, version=2, episode_id="another")
    assert await node.outcome(late) == "SUPERSEDED"
    await node.push(node.episode(lease, 1, failed=True, policies=()))
    await written(world, 10)
    found = await samples(world)
    assert found == dict.fromkeys(ids, "trained") | {
        late.trajectories[0].header.trajectory_id: "superseded",
        f"{lease.task.task_id}.0.1.n1.solver": "incomplete",
    }
    assert await samples(world, reasons=["trained"], min_step=2) == dict.fromkeys(ids[4:], "trained")
    status = await world.status()
    assert status.archive.given_up == 0
    assert status.archive.waiting_bytes == 0
    assert status.trajectories.conservation_error == 0


async def test_a_sample_has_its_tokens_step_and_batch(world: World, store_uri: str) -> None:
    trainer, node = await begun(world, store_uri, ALL)
    await trained(trainer, node, 1)
    await written(world, 4)
    (sample, *_) = (await world.ask(pb.ListSamplesResponse)).samples
    assert (sample.policy_id, sample.step, sample.item.reward) == ("solver", 1, 0.0)
    assert sample.batch_id.startswith("solver-1-")
    reply = await world.ask(pb.GetSamplesResponse, sample_ids=[sample.sample_id])
    (content,) = reply.samples
    pushed = Trajectory(trajectory_id=sample.item.trajectory_id)
    assert content.trajectory.trajectory_id == pushed.trajectory_id
    assert len(content.trajectory.token_ids) == 4 * sample.item.num_tokens
    with pytest.raises(NotFoundError):
        await world.ask(pb.GetSamplesResponse, sample_ids=[f"{sample.sample_id}9"])


async def test_only_what_the_recipe_names_is_kept(world: World, store_uri: str) -> None:
    archive = "{keep: [stale, voided], write_every_s: 0.1}"
    trainer, node = await begun(world, store_uri, archive, max_staleness=1, groups_per_step=1)
    await node.make_ready(1)
    batch = (await trainer.acquire(1)).batch
    await world.void(batch, batches.VOID_ACTION_DISCARD)
    await node.make_ready(1)
    await trainer.train(1, base_version=0)
    await trainer.mark_durable(1)
    await written(world, 2)
    assert set((await samples(world)).values()) == {"voided"}
    await world.has_account(trained=2, dropped={"voided": 2})


async def test_a_share_keeps_whole_groups_of_tasks_chosen_by_their_ids(world: World, store_uri: str) -> None:
    trainer, node = await begun(world, store_uri, "{share: 0.5, write_every_s: 0.1}", groups_per_step=8)
    await node.make_ready(8)
    batch = await trainer.train(1, base_version=0)
    await trainer.mark_durable(1)
    # The first 32 bits of the sha1 of their ids are below one half.
    hashes = {item.task_id: hashlib.sha1(item.task_id.encode()).digest()[0] for item in batch.items}
    kept = {item.trajectory_id for item in batch.items if hashes[item.task_id] < 128}
    assert 0 < len(kept) < 16
    half = ArchiveSettings(share=0.5)
    assert kept == {item.trajectory_id for item in batch.items if half.has_task(item.task_id)}
    await written(world, len(kept))
    assert set(await samples(world)) == kept


async def test_nothing_is_kept_without_an_archive_and_asking_says_so(world: World) -> None:
    trainer, node = await world.started(dataset="Unevaluated")
    await trained(trainer, node, 1)
    assert not (await world.status()).HasField("archive")
    with pytest.raises(PreconditionError, match=r"keeps no archive.*dataflow: \{archive"):
        await world.ask(pb.ListSamplesResponse)


async def test_without_the_extra_the_run_is_refused_with_what_to_install(
    world: World, store_uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "find_spec", lambda _: None)
    with pytest.raises(PreconditionError, match=r"pip install 'astraflow\[archive\]'"):
        await world.create_run(store_uri=store_uri, archive=ALL)


async def test_a_store_that_fails_holds_up_nothing_and_the_oldest_are_given_up(
    world: World, tmp_path: Path
) -> None:
    # A file stands where the store's folder would be made.
    (tmp_path / "blocked").write_text("")
    store_uri = (tmp_path / "blocked" / "store").as_uri()
    trainer, node = await begun(world, store_uri, "{write_every_s: 0.1, max_waiting_mib: 1}", overrides=LONG)
    for step in range(1, 4):
        await node.make_ready(2, version=step - 1, num_response=40_000)  # 4 × 325 kB
        await trainer.train(step, base_version=step - 1)
        await trainer.mark_durable(step)
    waits = await world.until(lambda now: any(wait.reason == "archive_failed" for wait in now.waits))
    (wait,) = [wait for wait in waits.waits if wait.reason == "archive_failed"]
    assert "blocked" in wait.detail
    assert "were given up" in wait.detail
    state = (await world.status()).archive
    assert state.given_up > 0
    assert state.given_up + state.waiting == 12
    # What is being written stays whatever comes, beside what is within the bound.
    assert state.waiting_bytes <= 2**21
    assert (await world.status()).trajectories.trained == 12
    (tmp_path / "blocked").unlink()
    await world.until(
        lambda now: now.archive.written == 12 - now.archive.given_up and not now.archive.problem
    )
    assert len(await samples(world)) == 12 - state.given_up


async def test_more_than_may_wait_is_counted_and_named(world: World, store_uri: str) -> None:
    trainer, node = await begun(world, store_uri, "{write_every_s: 3600, max_waiting_mib: 1}", overrides=LONG)
    await node.make_ready(2, num_response=40_000)
    await trainer.train(1, base_version=0)
    await trainer.mark_durable(1)
    status = await world.status()
    assert (status.archive.given_up, status.archive.waiting) == (2, 2)
    (wait,) = [wait for wait in status.waits if wait.stage == "archive"]
    assert wait.reason == "archive_behind"
    assert "2 were given up" in wait.detail


async def test_two_servers_write_one_archive(redis_url: str, tmp_path: Path, store_uri: str) -> None:
    async with served(redis_url, tmp_path / "a") as world, served(redis_url, tmp_path / "b") as other:
        trainer, node = await begun(world, store_uri, ALL)
        other.run_id = world.run_id
        await other.status()
        ids = [*await trained(trainer, node, 1), *await trained(trainer, node, 2)]
        await written(world, 8)
        assert await samples(other) == dict.fromkeys(ids, "trained")


@pytest.mark.parametrize("failpoint", ["dataflow.archive_sealed", "dataflow.archive_stored"])
async def test_a_server_that_is_killed_while_it_writes_leaves_each_row_once(
    process: DataflowProcess, redis_url: str, store_uri: str, failpoint: str
) -> None:
    process.start(failpoints=f"{failpoint}=kill")
    async with process.world() as world:
        trainer, node = await begun(world, store_uri, "{write_every_s: 2}")
        ids = await trained(trainer, node, 1)
        process.wait_until_ended()
        with Redis.from_url(redis_url) as client:  # its lease on the archive runs out
            client.hset(Keys(world.run_id).of("archive"), "writer_until", 0)
        process.start()
        await written(world, 4)
        assert [hit.name for hit in read_hits(process.failpoints_log)] == [failpoint]
        assert await samples(world) == dict.fromkeys(ids, "trained")


@pytest.mark.parametrize("deleted", [False, True])
async def test_deleting_a_run_deletes_its_archive_only_where_the_recipe_says_so(
    world: World, store_uri: str, tmp_path: Path, *, deleted: bool
) -> None:
    archive = f"{{write_every_s: 0.1, delete_with_run: {str(deleted).lower()}}}"
    trainer, node = await begun(world, store_uri, archive)
    await trained(trainer, node, 1)
    await written(world, 4)
    await world.ask(runs.DeleteRunResponse, force=True)
    assert bool(list((tmp_path / "objects").rglob("*.parquet"))) != deleted


async def test_a_server_that_never_served_a_run_deletes_its_archive_too(
    world: World, redis_url: str, store_uri: str, tmp_path: Path
) -> None:
    trainer, node = await begun(world, store_uri, "{write_every_s: 0.1, delete_with_run: true}")
    await trained(trainer, node, 1)
    await written(world, 4)
    (tmp_path / "other").mkdir()
    async with served(redis_url, tmp_path / "other") as other:
        await other.ask(runs.DeleteRunResponse, run_id=world.run_id, force=True)
    assert not list((tmp_path / "objects").rglob("*.parquet"))


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with S3Server(tmp_path_factory.mktemp("s3")) as server:
        yield server


async def test_an_archive_in_an_s3_store(s3: S3Server, redis_url: str, tmp_path: Path) -> None:
    bucket = f"archive-{uuid4().hex}"  # the store is there for all tests, and runs have one name
    s3.client().create_bucket(Bucket=bucket)
    async with over_s3(s3, redis_url, tmp_path) as world:
        trainer, node = await begun(world, f"s3://{bucket}/runs", ALL)
        ids = [*await trained(trainer, node, 1), *await trained(trainer, node, 2)]
        await written(world, 8)
        assert await samples(world) == dict.fromkeys(ids, "trained")
        (sample, *_) = (await world.ask(pb.ListSamplesResponse, min_step=2, policy_id="solver")).samples
        (content,) = (await world.ask(pb.GetSamplesResponse, sample_ids=[sample.sample_id])).samples
        assert content.trajectory.trajectory_id == sample.item.trajectory_id


@asynccontextmanager
async def over_s3(s3: S3Server, redis_url: str, tmp_path: Path) -> AsyncIterator[World]:
    """A server whose store is this one."""
    settings = {
        "store_endpoint_url": s3.url,
        "store_credentials_file": s3.credentials_file,
        "store_region": "us-east-1",
    }
    assert set(settings) <= set(DataflowServerSettings.model_fields)
    async with served(redis_url, tmp_path, **settings) as world:
        yield world


async def test_people_and_programs_list_and_show_samples_by_command(world: World, store_uri: str) -> None:
    trainer, node = await begun(world, store_uri, ALL)
    ids = await trained(trainer, node, 1)
    await written(world, 4)

    async def astraflow(*arguments: str) -> Ended:
        return await asyncio.to_thread(run, "samples", *arguments, "--join", world.address)

    listed = (
        await astraflow("list", "--policy", "solver", "--steps", "1", "--reason", "trained", "--json")
    ).json
    assert sorted(sample["item"]["trajectory_id"] for sample in listed) == sorted(ids)
    rewarded = await astraflow("list", "--min-reward", "1", "--limit", "1")
    assert "and more; --limit" in rewarded.output
    shown = (await astraflow("show", listed[0]["sample_id"], "--json")).json
    assert (shown["token_ids"], shown["logprobs"][4:]) == (list(range(8)), [-0.5] * 4)
    printed = await astraflow("show", listed[0]["sample_id"])
    assert "0 1 2 3 [v0]4 5 6 7" in printed.output
    assert "0.5 over the mean of 2 of its group)" in printed.output
    assert (await astraflow("list", "--role", "nobody")).output == "the archive has no such sample (yet)\n"
    assert (await astraflow("list", "--min-tokens", "9", "--json")).json == []
    unread = await astraflow("list", "--text", "four")
    assert (unread.status, "--tokenizer" in unread.errors) == (2, True)
    assert (await astraflow("show", "nonsense")).status == 2
