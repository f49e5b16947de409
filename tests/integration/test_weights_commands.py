"""`astraflow weights` against a store that a real publisher filled, with a real server and without one."""

import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from astraflow_weights.publish.version_writer import CommittedVersion
from astraflow_weights.store.file import FileStore
from astraflow_weights.store.layout import PolicyKeys
from astraflow_weights.versions.collection_records import PullLease, encode_lease
from astraflow_weights.versions.inspection import parts_by_base
from astraflow_weights.versions.manifest import NONCE_BYTES
from support import cli
from support.dataflow_world import World
from support.published_models import ModelPublisher, open_writer, publish_all, read_log, steps
from support.weight_fixtures import Ask, ask_server, ask_store
from support.weight_models import POLICY, RUN, make_model, overwrite
from support.work_stream import working

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("quiet")]


@pytest.fixture(autouse=True)
def published(weight_store: FileStore) -> list[CommittedVersion]:
    """Versions 0 to 2; only 0 offers a snapshot."""
    return publish_all(ModelPublisher(open_writer(weight_store)), steps(3, density=0.005))


def asked_twice(ask: Ask, *arguments: str) -> tuple[str, Any]:
    """What a command says to people, and to programs."""
    told, parsed = ask(*arguments), ask(*arguments, "--json")
    assert (told.status, parsed.status) == (0, 0), told.errors + parsed.errors
    return told.output, parsed.json


def test_list_tells_what_was_published(ask: Ask, published: list[CommittedVersion]) -> None:
    told, rows = asked_twice(ask, "list")
    assert [row["version"] for row in rows] == [2, 1, 0]
    for row, version in zip(reversed(rows), published, strict=True):
        assert (row["step"], row["writer_epoch"], row["pinned"]) == (version.step, 1, None)
        assert (row["delta_bytes"], row["snapshot_bytes"]) == (version.delta_bytes, version.snapshot_bytes)
        assert row["density"] == version.density
        assert f"{row['delta_bytes'] or row['snapshot_bytes']:,}" in told


def test_show_tells_codecs_routes_and_tensors(ask: Ask, published: list[CommittedVersion]) -> None:
    told, shown = asked_twice(ask, "show", "2")
    (path,) = shown["paths"]
    assert (path["base_version"], path["size_bytes"]) == (1, published[2].delta_bytes)
    assert sum(codec["num_changed"] for codec in path["codecs"].values()) == published[2].num_changed
    assert [(route["held"], route["steps"]) for route in shown["routes"]] == [(None, 3), (1, 1)]
    assert (shown["chain_length"], shown["nodes"], shown["pull_leases"]) == (3, None, [])
    assert {tensor["name"] for tensor in shown["tensors"]} == set(make_model())
    assert shown["served_by"] is None
    assert "delta from 1" in told
    assert "RICE" in told


def test_show_tells_which_pulls_fetch_its_parts(ask: Ask, weight_store: FileStore) -> None:
    keys, now_s = PolicyKeys(RUN, POLICY), time.time()
    first, second, third = (
        {part.sha256 for parts in parts_by_base(record).values() for part in parts}
        for record in read_log(weight_store).records
    )
    for holder, parts, expires_in_s in ((1, first | second, 600), (2, second, -1), (3, third, 600)):
        name, expires_time_s = bytes([holder]) * NONCE_BYTES, now_s + expires_in_s
        lease = PullLease(holder=name, parts=frozenset(parts), expires_time_s=expires_time_s)
        weight_store.put_if_absent(keys.lease(name, 0), encode_lease(keys, lease))
    weight_store.put_if_absent(keys.lease(bytes(NONCE_BYTES), 0), b"not a lease")
    (pull,) = ask("show", "1", "--json").json["pull_leases"]
    assert (pull["holder"], pull["parts"], pull["all_parts"]) == ("01" * NONCE_BYTES, 1, len(first) + 1)
    assert "pull 01010101" in ask("show", "1").output


def test_verify_succeeds_on_whole_versions(ask: Ask, published: list[CommittedVersion]) -> None:
    for version in published:
        parsed = ask("verify", str(version.version), "--json")
        assert (parsed.status, parsed.json["ok"], parsed.json["faults"]) == (0, True, [])
        assert parsed.json["model_root"] == version.model_root.hex()
    assert "version 2 is whole" in ask("verify", "2").output


def test_verify_names_the_damaged_part_and_ends_with_status_1(ask: Ask, weight_store: FileStore) -> None:
    key = next(info.key for info in weight_store.list(f"{RUN}/{POLICY}/parts/"))
    content = weight_store.get(key)
    overwrite(weight_store, key, content[:-1] + bytes([content[-1] ^ 1]))
    ended = [ask("verify", str(version), "--json") for version in range(3)]
    assert ended[2].status == 1
    faults = [fault for found in ended for fault in found.json["faults"]]
    assert key in {fault["part"] for fault in faults}
    assert all(key in fault["problem"] for fault in faults)
    assert "is damaged" in ask("verify", "2").output


def test_diff_tells_the_share_of_each_tensor(ask: Ask, published: list[CommittedVersion]) -> None:
    told, found = asked_twice(ask, "diff", "1", "2")
    assert found["num_changed"] == published[2].num_changed
    changed = {tensor["name"] for tensor in found["tensors"] if tensor["num_changed"]}
    for names in (changed, told):
        assert ("model.embed.weight" in names, "model.norm" in names) == (True, False)


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
    assert (ended.status, words in ended.errors) == (2, True)


def test_a_store_needs_run_and_policy(weight_store: FileStore) -> None:
    ended = cli.run("weights", "list", "--store", weight_store.uri)
    assert (ended.status, "say --run-id and --policy, too" in ended.errors) == (2, True)


def test_a_run_that_has_ended_is_told_how_to_look_at_its_versions(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        gone.wait()
    (tmp_path / "addresses").mkdir()
    address = {"pid": gone.pid, "grpc": "127.0.0.1:1"}
    (tmp_path / "addresses" / "dataflow.json").write_text(json.dumps(address))
    ended = cli.run("weights", "list", "--data-dir", str(tmp_path))
    assert (ended.status, "--store file://FOLDER/store" in ended.errors) == (75, True)


def test_a_misspelt_folder_is_refused_and_not_made(tmp_path: Path) -> None:
    missing = tmp_path / "wieghts"
    ended = ask_store(missing.as_uri(), "list")
    assert (ended.status, "no folder of this machine" in ended.errors) == (2, True)
    assert not missing.exists()


def test_a_run_without_versions_is_told_as_such(ask: Ask) -> None:
    ended = ask("list", run_id="other")
    assert (ended.status, ended.errors) == (0, "")
    assert "has no version" in ended.output


async def test_a_server_tells_store_pins_and_who_serves_a_version(
    world: World, weight_store: FileStore, published: list[CommittedVersion]
) -> None:
    await world.create_run(name=RUN, store_uri=weight_store.uri)
    trainer = await world.trainer(publish_first=False)
    await trainer.publish(version=0, step=0, content=published[0].manifest_sha256)
    await world.node("n1")
    pinned = await ask_server(world, "pin", "0", "--reason", "best so far", "--json")
    assert (pinned.status, pinned.json["pin"]["reason"]) == (0, "best so far"), pinned.errors
    rows = (await ask_server(world, "list", "--json")).json
    assert [row["version"] for row in rows] == [2, 1, 0]
    assert [(row["pinned"], row["pin_reason"]) for row in rows] == [(False, None)] * 2 + [
        (True, "best so far")
    ]
    async with working(world, "n1") as session:
        await session.credits(0, solver=0)
        await world.serves(0)
        shown = (await ask_server(world, "show", "0", "--json")).json
    assert (shown["announced"], shown["pinned"], shown["served_by"]) == (True, True, ["n1"])
    (node,) = shown["nodes"]
    assert (node["node_id"], node["connected"], node["serving_version"]) == ("n1", True, 0)
    later = await ask_server(world, "show", "1")
    assert "no: no node may activate it" in later.output
    assert re.search(r"n1 +(works|away) +0", later.output)
    for told in ("is no longer pinned", "was not pinned"):
        assert told in (await ask_server(world, "unpin", "0")).output


async def test_a_run_of_two_policies_asks_which_one_is_meant(world: World, weight_store: FileStore) -> None:
    await world.create_run(name=RUN, store_uri=weight_store.uri, policies=("solver", "verifier"))
    which = await ask_server(world, "list")
    assert (which.status, "--policy solver|verifier" in which.errors) == (2, True)
    unknown = await ask_server(world, "list", "--policy", "sovler")
    assert (unknown.status, "it has solver, verifier" in unknown.errors) == (2, True)
