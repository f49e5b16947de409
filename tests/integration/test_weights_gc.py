"""`astraflow weights gc` against a store that a real publisher filled, with a real server and without one."""

from __future__ import annotations

import asyncio
import io
from pathlib import Path

import pytest

from astraflow_kit import log
from astraflow_kit.clock import SystemClock
from astraflow_weights.publish.version_writer import CommittedVersion, VersionWriter
from astraflow_weights.settings import PublishSettings
from astraflow_weights.store.file import FileStore
from astraflow_weights.store.layout import PolicyKeys
from astraflow_weights.versions.inspection import buildable
from astraflow_weights.versions.intents import UploadIntents
from astraflow_weights.versions.log import VersionLog
from support import cli
from support.cli import Ended
from support.dataflow_world import World, until
from support.published_models import ModelPublisher
from support.weight_models import make_model, trained
from support.work_stream import working

pytestmark = pytest.mark.integration

RUN, POLICY = "run", "solver"
LAST = 7


@pytest.fixture(autouse=True)
def quiet() -> None:
    """The server shares this process: its log must not be taken for what a command prints."""
    log.configure("test", stream=io.StringIO())


@pytest.fixture
def store(tmp_path: Path) -> FileStore:
    return FileStore(tmp_path / "weights")


@pytest.fixture
def published(store: FileStore) -> list[CommittedVersion]:
    """Versions 0 to 7 with snapshots at 0, 2, 4 and 6."""
    settings = PublishSettings(snapshot_every_versions=2, snapshot_chain_ratio=100)
    writer = VersionWriter.open(store, run_id=RUN, policy_id=POLICY, epoch=1, settings=settings)
    publisher, model, found = ModelPublisher(writer), make_model(), []
    for step in range(LAST + 1):
        found.append(publisher.publish(model, step=step))
        model = trained(model, step)
    return found


def collect(store: FileStore, *arguments: str) -> Ended:
    """Without a server."""
    where = ["--store", store.uri, "--run-id", RUN, "--policy", POLICY]
    return cli.run("weights", "gc", *where, *arguments)


def kept(store: FileStore) -> set[int]:
    """Versions that can be built."""
    versions = VersionLog(store, run_id=RUN, policy_id=POLICY)
    versions.refresh()
    return set(buildable(versions))


def stored_bytes(store: FileStore) -> int:
    """Bytes of all parts."""
    return sum(info.size_bytes for info in store.list(PolicyKeys(RUN, POLICY).parts))


def test_without_a_server_pins_must_be_given_up_in_words(
    store: FileStore, published: list[CommittedVersion]
) -> None:
    refused = collect(store, "--grace", "0")
    assert refused.status == 2
    assert "--ignore-pins" in refused.errors
    assert kept(store) == set(range(len(published)))


def test_what_is_not_kept_is_deleted_and_told(store: FileStore, published: list[CommittedVersion]) -> None:
    before = stored_bytes(store)
    tried = collect(store, "--dry-run", "--json")
    assert (tried.status, tried.json["state"], stored_bytes(store)) == (0, "dry run", before), tried.errors
    done = collect(store, "--ignore-pins", "--grace", "0", "--json")
    assert (done.status, done.json["state"]) == (0, "done"), done.errors
    assert done.json["swept_bytes"] == tried.json["garbage_bytes"] == before - stored_bytes(store) > 0
    assert done.json["horizon"] == 4
    assert kept(store) == {4, 5, 6, 7} < set(range(len(published)))
    told = collect(store, "--ignore-pins", "--grace", "0")
    assert "kept: newest 2 snapshots and all after" in told.output
    assert "0 parts of 0 bytes were deleted" in told.output


def test_more_snapshots_keep_more(store: FileStore, published: list[CommittedVersion]) -> None:
    collect(store, "--ignore-pins", "--grace", "0", "--keep-snapshots", "3")
    assert kept(store) == set(range(2, len(published)))


def test_a_collected_version_is_told_by_verify_and_list(
    store: FileStore, published: list[CommittedVersion]
) -> None:
    collect(store, "--ignore-pins", "--grace", "0")
    where = ["--store", store.uri, "--run-id", RUN, "--policy", POLICY]
    ended = cli.run("weights", "verify", "1", *where)
    assert ended.status == 1
    assert "were collected" in ended.output + ended.errors
    rows = cli.run("weights", "list", "--json", *where).json
    assert [row["version"] for row in rows if row["collected"]] == [3, 2, 1, 0]
    assert len(rows) == len(published)


async def test_a_server_is_asked_for_pins_and_for_what_nodes_serve(
    world: World, store: FileStore, published: list[CommittedVersion]
) -> None:
    await world.create_run(store_uri=store.uri)
    trainer = await world.trainer(publish_first=False)
    await trainer.publish(version=0, step=0, content=published[0].manifest_sha256)
    await world.node("n1")
    await asyncio.to_thread(cli.run, "weights", "pin", "0", "--join", world.address)
    async with working(world, "n1") as session:
        await session.credits(0, solver=0)
        await until(lambda: _serves(world, 0))
        done = await _collect_asking(world)
    assert _reasons(done) >= {"pinned", "the path of nodes to the newest version"}
    assert kept(store) >= {0, 4, 5, 6, 7}
    await asyncio.to_thread(cli.run, "weights", "unpin", "0", "--join", world.address)
    assert _reasons(await _collect_asking(world)) >= {
        "newest announced",
        "the path of nodes to the newest version",
    }
    assert kept(store) >= {0, 4, 5, 6, 7}


async def _collect_asking(world: World) -> Ended:
    done = await asyncio.to_thread(
        cli.run, "weights", "gc", "--grace", "0", "--join", world.address, "--json"
    )
    assert done.status == 0, done.errors
    return done


def _reasons(ended: Ended) -> set[str]:
    return {share["why"] for share in ended.json["kept"]}


async def _serves(world: World, version: int) -> bool:
    return any(dict(node.serving_versions) == {POLICY: version} for node in (await world.status()).nodes)


def test_a_round_that_was_begun_is_finished_by_the_next_command(
    store: FileStore, published: list[CommittedVersion], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("astraflow_weights.tools.collection_command._WRITERS_S", 0)
    intents = UploadIntents(store, keys=PolicyKeys(RUN, POLICY), clock=SystemClock())
    intents.open(epoch=1)
    blocked = collect(store, "--ignore-pins", "--grace", "0", "--json")
    assert (blocked.json["state"], blocked.json["swept_parts"]) == ("waits for a writer", 0)
    assert len(kept(store)) == len(published)
    intents.close()
    done = collect(store, "--ignore-pins", "--grace", "0", "--json")
    assert done.json["swept_parts"] == blocked.json["garbage_parts"]
