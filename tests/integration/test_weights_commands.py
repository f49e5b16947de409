"""`astraflow weights` against a store that a real publisher filled, with a real server and without one."""

from __future__ import annotations

import asyncio
import io
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from astraflow_kit import log
from astraflow_weights.publish.version_writer import CommittedVersion, VersionWriter
from astraflow_weights.store.file import FileStore
from astraflow_weights.store.layout import PolicyKeys
from astraflow_weights.versions.collection_records import PullLease, encode_lease
from astraflow_weights.versions.inspection import parts_by_base
from astraflow_weights.versions.log import VersionLog
from astraflow_weights.versions.manifest import NONCE_BYTES
from support import cli
from support.cli import Ended
from support.dataflow_world import World, until
from support.published_models import ModelPublisher
from support.weight_models import make_model, overwrite, trained
from support.work_stream import working

pytestmark = pytest.mark.integration

RUN, POLICY = "run", "solver"
Ask = Callable[..., Ended]


@pytest.fixture(autouse=True)
def quiet() -> None:
    """The server shares this process: its log must not be taken for what a command prints."""
    log.configure("test", stream=io.StringIO())


@pytest.fixture
def store(tmp_path: Path) -> FileStore:
    return FileStore(tmp_path / "weights")


@pytest.fixture
def published(store: FileStore) -> list[CommittedVersion]:
    """Versions 0 to 2; only 0 offers a snapshot."""
    writer = VersionWriter.open(store, run_id=RUN, policy_id=POLICY, epoch=1)
    publisher, model = ModelPublisher(writer), make_model()
    found = []
    for step in range(3):
        found.append(publisher.publish(model, step=step))
        model = trained(model, step, density=0.005)
    return found


@pytest.fixture
def ask(store: FileStore, published: list[CommittedVersion]) -> Ask:
    """Runs `astraflow weights ARGUMENTS` on the store, without a server."""

    def run(*arguments: str) -> Ended:
        return _run([*arguments, "--store", store.uri, "--run-id", RUN, "--policy", POLICY])

    return run


def _run(arguments: list[str]) -> Ended:
    return cli.run("weights", *arguments)


async def _ask_server(world: World, *arguments: str) -> Ended:
    return await asyncio.to_thread(_run, [*arguments, "--join", world.address])


async def _serves(world: World, version: int) -> bool:
    return any(dict(node.serving_versions) == {POLICY: version} for node in (await world.status()).nodes)


def test_list_tells_what_was_published(ask: Ask, published: list[CommittedVersion]) -> None:
    told, parsed = ask("list"), ask("list", "--json")
    assert (told.status, parsed.status) == (0, 0), told.errors + parsed.errors
    assert [row["version"] for row in parsed.json] == [2, 1, 0]
    for row, version in zip(reversed(parsed.json), published, strict=True):
        assert (row["step"], row["writer_epoch"], row["pinned"]) == (version.step, 1, None)
        assert (row["delta_bytes"], row["snapshot_bytes"]) == (version.delta_bytes, version.snapshot_bytes)
        assert row["density"] == version.density
        assert f"{row['delta_bytes'] or row['snapshot_bytes']:,}" in told.output


def test_show_tells_codecs_routes_and_tensors(ask: Ask, published: list[CommittedVersion]) -> None:
    told, parsed = ask("show", "2"), ask("show", "2", "--json")
    assert (told.status, parsed.status) == (0, 0), told.errors + parsed.errors
    (path,) = parsed.json["paths"]
    assert (path["base_version"], path["size_bytes"]) == (1, published[2].delta_bytes)
    assert sum(codec["num_changed"] for codec in path["codecs"].values()) == published[2].num_changed
    assert [(route["held"], route["steps"]) for route in parsed.json["routes"]] == [(None, 3), (1, 1)]
    assert (parsed.json["chain_length"], parsed.json["nodes"], parsed.json["pull_leases"]) == (3, None, [])
    assert {tensor["name"] for tensor in parsed.json["tensors"]} == set(make_model())
    assert parsed.json["served_by"] is None
    assert "delta from 1" in told.output
    assert "RICE" in told.output


def test_show_tells_which_pulls_fetch_its_parts(ask: Ask, store: FileStore) -> None:
    keys, now_s = PolicyKeys(RUN, POLICY), time.time()
    log = VersionLog(store, run_id=RUN, policy_id=POLICY)
    log.refresh()
    first, second, third = (
        {part.sha256 for parts in parts_by_base(record).values() for part in parts} for record in log.records
    )
    for holder, parts, expires_in_s in ((1, first | second, 600), (2, second, -1), (3, third, 600)):
        lease = PullLease(
            holder=bytes([holder]) * NONCE_BYTES,
            parts=frozenset(parts),
            expires_time_s=now_s + expires_in_s,
        )
        store.put_if_absent(keys.lease(lease.holder, 0), encode_lease(keys, lease))
    store.put_if_absent(keys.lease(bytes(NONCE_BYTES), 0), b"not a lease")
    (pull,) = ask("show", "1", "--json").json["pull_leases"]
    assert (pull["holder"], pull["parts"], pull["all_parts"]) == ("01" * NONCE_BYTES, 1, len(first) + 1)
    assert "pull 01010101" in ask("show", "1").output


def test_verify_succeeds_on_whole_versions(ask: Ask, published: list[CommittedVersion]) -> None:
    for version in published:
        parsed = ask("verify", str(version.version), "--json")
        assert (parsed.status, parsed.json["ok"], parsed.json["faults"]) == (0, True, [])
        assert parsed.json["model_root"] == version.model_root.hex()
    assert "version 2 is whole" in ask("verify", "2").output


def test_verify_names_the_damaged_part_and_ends_with_status_1(ask: Ask, store: FileStore) -> None:
    key = next(info.key for info in store.list(f"{RUN}/{POLICY}/parts/"))
    content = store.get(key)
    overwrite(store, key, content[:-1] + bytes([content[-1] ^ 1]))
    ended = [ask("verify", str(version), "--json") for version in range(3)]
    assert ended[2].status == 1
    faults = [fault for found in ended for fault in found.json["faults"]]
    assert key in {fault["part"] for fault in faults}
    assert all(key in fault["problem"] for fault in faults)
    assert "is damaged" in ask("verify", "2").output


def test_diff_tells_the_share_of_each_tensor(ask: Ask, published: list[CommittedVersion]) -> None:
    told, parsed = ask("diff", "1", "2"), ask("diff", "1", "2", "--json")
    assert (told.status, parsed.status) == (0, 0), told.errors + parsed.errors
    assert parsed.json["num_changed"] == published[2].num_changed
    changed = {tensor["name"] for tensor in parsed.json["tensors"] if tensor["num_changed"]}
    assert "model.embed.weight" in changed
    assert "model.norm" not in changed
    assert "model.embed.weight" in told.output
    assert "model.norm" not in told.output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["show", "9"], "it holds 0 to 2; look at `astraflow weights list`"),
        (["verify", "3"], "there is no version 3"),
        (["diff", "0", "7"], "there is no version 7"),
    ],
)
def test_an_unknown_version_is_refused_with_those_that_exist(
    ask: Ask, arguments: list[str], words: str
) -> None:
    ended = ask(*arguments)
    assert ended.status == 2
    assert words in ended.errors


def test_a_store_needs_run_and_policy(store: FileStore) -> None:
    ended = _run(["list", "--store", store.uri])
    assert ended.status == 2
    assert "say --run-id and --policy, too" in ended.errors


def test_a_run_that_has_ended_is_told_how_to_look_at_its_versions(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        gone.wait()
    (tmp_path / "addresses").mkdir()
    address = {"pid": gone.pid, "grpc": "127.0.0.1:1"}
    (tmp_path / "addresses" / "dataflow.json").write_text(json.dumps(address))
    ended = _run(["list", "--data-dir", str(tmp_path)])
    assert ended.status == 75
    assert "--store file://FOLDER/store" in ended.errors


def test_a_misspelt_folder_is_refused_and_not_made(tmp_path: Path) -> None:
    missing = tmp_path / "wieghts"
    ended = _run(["list", "--store", missing.as_uri(), "--run-id", RUN, "--policy", POLICY])
    assert ended.status == 2
    assert "no folder of this machine" in ended.errors
    assert not missing.exists()


@pytest.mark.usefixtures("published")
def test_a_run_without_versions_is_told_as_such(store: FileStore) -> None:
    ended = _run(["list", "--store", store.uri, "--run-id", "other", "--policy", POLICY])
    assert (ended.status, ended.errors) == (0, "")
    assert "has no version" in ended.output


async def test_a_server_tells_store_pins_and_who_serves_a_version(
    world: World, store: FileStore, published: list[CommittedVersion]
) -> None:
    await world.create_run(store_uri=store.uri)
    trainer = await world.trainer(publish_first=False)
    await trainer.publish(version=0, step=0, content=published[0].manifest_sha256)
    await world.node("n1")
    pinned = await _ask_server(world, "pin", "0", "--reason", "best so far", "--json")
    assert (pinned.status, pinned.json["pin"]["reason"]) == (0, "best so far"), pinned.errors
    rows = (await _ask_server(world, "list", "--json")).json
    assert [(row["version"], row["pinned"], row["pin_reason"]) for row in rows] == [
        (2, False, None),
        (1, False, None),
        (0, True, "best so far"),
    ]
    async with working(world, "n1") as session:
        await session.credits(0, solver=0)
        await until(lambda: _serves(world, 0))
        shown = (await _ask_server(world, "show", "0", "--json")).json
    assert (shown["announced"], shown["pinned"], shown["served_by"]) == (True, True, ["n1"])
    assert [(node["node_id"], node["connected"], node["serving_version"]) for node in shown["nodes"]] == [
        ("n1", True, 0)
    ]
    later = await _ask_server(world, "show", "1")
    assert "no: no node may activate it" in later.output
    assert "no node" in later.output
    assert re.search(r"n1 +(works|away) +0", later.output)
    for told in ("is no longer pinned", "was not pinned"):
        assert told in (await _ask_server(world, "unpin", "0")).output


async def test_a_run_of_two_policies_asks_which_one_is_meant(world: World, store: FileStore) -> None:
    await world.create_run(store_uri=store.uri, policies=("solver", "verifier"))
    which = await _ask_server(world, "list")
    assert (which.status, "--policy solver|verifier" in which.errors) == (2, True)
    unknown = await _ask_server(world, "list", "--policy", "sovler")
    assert (unknown.status, "it has solver, verifier" in unknown.errors) == (2, True)
