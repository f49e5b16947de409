"""`astraflow weights gc` against a store that a real publisher filled, with a real server and without one."""

import pytest

from astraflow_kit.clock import SystemClock
from astraflow_weights.publish.version_writer import CommittedVersion
from astraflow_weights.settings import PublishSettings
from astraflow_weights.store.file import FileStore
from astraflow_weights.store.layout import PolicyKeys
from astraflow_weights.versions.inspection import buildable
from astraflow_weights.versions.intents import UploadIntents
from support.cli import Ended
from support.dataflow_world import World
from support.published_models import ModelPublisher, open_writer, publish_all, read_log, steps
from support.weight_fixtures import Ask, ask_server
from support.weight_models import POLICY, RUN
from support.work_stream import working

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("quiet")]


@pytest.fixture(autouse=True)
def published(weight_store: FileStore) -> list[CommittedVersion]:
    """Versions 0 to 7 with snapshots at 0, 2, 4 and 6."""
    settings = PublishSettings(snapshot_every_versions=2, snapshot_chain_ratio=100)
    return publish_all(ModelPublisher(open_writer(weight_store, settings=settings)), steps(8))


def kept(store: FileStore) -> set[int]:
    """Versions that can be built."""
    return set(buildable(read_log(store)))


def stored_bytes(store: FileStore) -> int:
    """Bytes of all parts."""
    return sum(info.size_bytes for info in store.list(PolicyKeys(RUN, POLICY).parts))


def collected(ask: Ask, *options: str) -> Ended:
    """Collect at once, whatever is pinned."""
    return ask("gc", "--ignore-pins", "--grace", "0", *options)


def test_without_a_server_pins_must_be_given_up_in_words(ask: Ask, weight_store: FileStore) -> None:
    refused = ask("gc", "--grace", "0")
    assert (refused.status, "--ignore-pins" in refused.errors) == (2, True)
    assert kept(weight_store) == set(range(8))


def test_what_is_not_kept_is_deleted_and_told(ask: Ask, weight_store: FileStore) -> None:
    before = stored_bytes(weight_store)
    tried = ask("gc", "--dry-run", "--json")
    assert tried.status == 0, tried.errors
    assert (tried.json["state"], stored_bytes(weight_store)) == ("dry run", before)
    done = collected(ask, "--json")
    assert (done.status, done.json["state"]) == (0, "done"), done.errors
    assert done.json["swept_bytes"] == tried.json["garbage_bytes"] == before - stored_bytes(weight_store) > 0
    assert done.json["horizon"] == 4
    assert kept(weight_store) == {4, 5, 6, 7} < set(range(8))
    told = collected(ask)
    assert "kept: newest 2 snapshots and all after" in told.output
    assert "0 parts of 0 bytes were deleted" in told.output


def test_more_snapshots_keep_more(ask: Ask, weight_store: FileStore) -> None:
    collected(ask, "--keep-snapshots", "3")
    assert kept(weight_store) == set(range(2, 8))


def test_a_collected_version_is_told_by_verify_and_list(ask: Ask) -> None:
    collected(ask)
    ended = ask("verify", "1")
    assert (ended.status, "were collected" in ended.output + ended.errors) == (1, True)
    rows = ask("list", "--json").json
    assert [row["version"] for row in rows if row["collected"]] == [3, 2, 1, 0]
    assert len(rows) == 8


async def test_a_server_is_asked_for_pins_and_for_what_nodes_serve(
    world: World, weight_store: FileStore, published: list[CommittedVersion]
) -> None:
    await world.create_run(name=RUN, store_uri=weight_store.uri)
    trainer = await world.trainer(publish_first=False)
    await trainer.publish(version=0, step=0, content=published[0].manifest_sha256)
    await world.node("n1")
    await ask_server(world, "pin", "0")
    async with working(world, "n1") as session:
        await session.credits(0, solver=0)
        await world.serves(0)
        assert await reasons(world) >= {"pinned", "the path of nodes to the newest version"}
    assert kept(weight_store) >= {0, 4, 5, 6, 7}
    await ask_server(world, "unpin", "0")
    assert await reasons(world) >= {"newest announced", "the path of nodes to the newest version"}
    assert kept(weight_store) >= {0, 4, 5, 6, 7}


async def reasons(world: World) -> set[str]:
    """Collect; why what is kept is."""
    done = await ask_server(world, "gc", "--grace", "0", "--json")
    assert done.status == 0, done.errors
    return {share["why"] for share in done.json["kept"]}


def test_a_round_that_was_begun_is_finished_by_the_next_command(
    ask: Ask, weight_store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("astraflow_weights.tools.collection_command._WRITERS_S", 0)
    intents = UploadIntents(weight_store, keys=PolicyKeys(RUN, POLICY), clock=SystemClock())
    intents.open(epoch=1)
    blocked = collected(ask, "--json")
    assert (blocked.json["state"], blocked.json["swept_parts"]) == ("waits for a writer", 0)
    assert len(kept(weight_store)) == 8
    intents.close()
    done = collected(ask, "--json")
    assert done.json["swept_parts"] == blocked.json["garbage_parts"]
