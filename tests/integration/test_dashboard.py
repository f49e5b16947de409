"""What the page asks for over HTTP: the rpcs' own answers, for who may read them, and nothing that acts."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from astraflow.client import AsyncClient, Connection
from astraflow.dataflow.v1 import admin_service_pb2 as admin
from astraflow.dataflow.v1.run_service_pb2 import JoinRunRequest
from astraflow.errors import PermissionError_
from astraflow_dataflow.dashboard.site import BUNDLE
from support.cli import run
from support.dataflow_world import World, served
from support.recorded_run import EPISODE, Turn, pages, record
from support.tokens import keys_file, token

pytestmark = pytest.mark.integration


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    folder = tmp_path / "bundle"
    folder.mkdir()
    for name in ("index.html", "app.js", "app.css"):
        (folder / name).write_text(f"the file {name}")
    return folder


@pytest.fixture
async def page(world: World, bundle: Path) -> AsyncIterator[httpx.AsyncClient]:
    async with (
        pages(world, bundle=bundle) as address,
        httpx.AsyncClient(base_url=f"http://{address}", timeout=120) as client,
    ):
        yield client


async def rpc(client: httpx.AsyncClient, name: str, **request: object) -> httpx.Response:
    return await client.get(f"/api/rpc/{name}", params={"request": json.dumps(request)})


async def told(client: httpx.AsyncClient, name: str, **request: object) -> Any:
    answer = await rpc(client, name, **request)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_an_answer_is_that_of_the_rpc(world: World, page: httpx.AsyncClient) -> None:
    await world.started(dataset="Counting")
    status = await told(page, "AdminService/Status", run_id=world.run_id)
    same = await world.status()
    assert (status["run_id"], status["state"]) == (same.run_id, "active")
    assert [node["node_id"] for node in status["nodes"]] == [node.node_id for node in same.nodes]
    assert status["policies"][0]["recent_training_reward"] is None  # not a number: nothing was completed
    assert [run["run_id"] for run in (await told(page, "RunService/ListRuns"))["runs"]] == [world.run_id]


REFUSED = [
    ("AdminService/Status", {"run_id": "gone"}, 404, "NOT_FOUND", "no run 'gone'"),
    ("AdminService/Status", {"run": "x"}, 400, "INVALID_ARGUMENT", 'no field named "run"'),
    ("AdminService/ListSteps", {"policy_id": "nobody"}, 404, "NOT_FOUND", "nobody"),
    ("SampleService/ListSamples", {}, 409, "FAILED_PRECONDITION", "keeps no archive"),
    ("AdminService/DrainNode", {"node_id": "n1"}, 404, "NOT_FOUND", "no reading rpc"),
    ("RunService/DeleteRun", {}, 404, "NOT_FOUND", "no reading rpc"),
    ("TaskService/Work", {}, 404, "NOT_FOUND", "no reading rpc"),
]


@pytest.mark.parametrize(("name", "request_", "status", "slug", "words"), REFUSED)
async def test_a_refusal_is_the_rpcs_own_and_nothing_that_acts_is_there(
    world: World,
    page: httpx.AsyncClient,
    name: str,
    request_: dict[str, str],
    status: int,
    slug: str,
    words: str,
) -> None:
    await world.started(dataset="Counting")
    answer = await rpc(page, name, **request_)
    assert (answer.status_code, answer.json()["error"]) == (status, slug)
    assert words in answer.json()["message"]


async def test_every_rpc_of_the_page_is_for_reading(world: World, page: httpx.AsyncClient) -> None:
    message = (await rpc(page, "X/Y")).json()["message"]
    names = message.partition("the page has ")[2].split(", ")
    assert "AdminService/Watch" in names
    assert all(
        name.partition("/")[2].startswith(("Get", "List", "Status", "Watch", "Why", "PoolReport"))
        for name in names
    )


async def test_a_status_is_streamed_as_events_that_begin_with_the_process(
    world: World, page: httpx.AsyncClient
) -> None:
    await world.started(dataset="Counting")
    seen: list[str] = []
    async with page.stream("GET", "/api/rpc/AdminService/Watch", params={"request": "{}"}) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        async for line in answer.aiter_lines():
            seen.append(line)
            if line.startswith("data: ") and "policies" in line:
                break
    process = (await page.get("/api/session")).json()["process"]
    assert seen[:2] == ["event: hello", f'data: {{"process": "{process}"}}']
    assert json.loads(seen[-1].removeprefix("data: "))["status"]["run_id"] == world.run_id


async def test_a_stream_of_a_run_that_is_not_there_says_so(page: httpx.AsyncClient) -> None:
    answer = await page.get("/api/rpc/AdminService/Watch", params={"request": '{"run_id": "gone"}'})
    assert "event: refused" in answer.text
    assert "create one first" in answer.text or "gone" in answer.text
    assert answer.text.endswith("event: bye\ndata: {}\n\n")


async def test_files_come_with_a_policy_that_lets_no_other_script_run(page: httpx.AsyncClient) -> None:
    for path, name in (("/", "index.html"), ("/app.js", "app.js"), ("/app.css", "app.css")):
        answer = await page.get(path)
        assert answer.text == f"the file {name}"
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "script-src 'self';" in policy
        assert "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"


async def test_a_server_without_the_bundle_says_which_command_brings_it(world: World, tmp_path: Path) -> None:
    async with (
        pages(world, bundle=tmp_path / "none") as address,
        httpx.AsyncClient(base_url=f"http://{address}", timeout=120) as client,
    ):
        answer = await client.get("/")
        assert answer.status_code == 200
        assert "make web" in answer.text
        assert (await client.get("/app.js")).status_code == 404


async def test_another_name_for_the_server_gets_nothing(page: httpx.AsyncClient) -> None:
    for path in ("/", "/api/session", "/login"):
        assert (await page.get(path, headers={"host": "evil.example"})).status_code == 421


async def test_with_tokens_the_files_are_open_and_the_rest_is_for_viewers(
    redis_url: str, tmp_path: Path, bundle: Path
) -> None:
    settings = {"token_keys_file": keys_file(tmp_path)}
    async with served(redis_url, tmp_path) as world:
        await world.started(dataset="Counting")
    async with (
        served(redis_url, tmp_path, **settings) as world,
        pages(world, bundle=bundle) as address,
        httpx.AsyncClient(base_url=f"http://{address}", timeout=120) as client,
    ):
        assert (await client.get("/")).status_code == 200
        assert (await client.get("/api/session")).status_code == 401
        assert (await rpc(client, "AdminService/Status")).json()["reason"] == "missing"
        bad = await client.post("/login", data={"token": "forged"})
        assert (bad.status_code, "set-cookie" in bad.headers) == (401, False)
        node = await client.post("/login", data={"token": token("n", "rollout")})
        assert (node.status_code, "for viewers" in node.json()["message"]) == (400, True)

        done = await client.post("/login", data={"token": token("ada", "viewer", runs=["run"])})
        assert (done.status_code, done.headers["location"]) == (303, "/")
        assert {"httponly", "samesite=strict"} <= set(
            done.headers["set-cookie"].lower().replace(" ", "").split(";")
        )
        assert (await client.get("/api/session")).json()["subject"] == "ada"
        assert (await told(client, "AdminService/Status", run_id="run"))["run_id"] == "run"

        await client.post("/login", data={"token": token("eve", "viewer", runs=["other"])})
        refused = await rpc(client, "AdminService/Status", run_id="run")
        assert (refused.status_code, refused.json()["metadata"]["reason"]) == (403, "run")
        assert (await told(client, "RunService/ListRuns"))["runs"] == []
        await client.post("/logout")
        assert (await client.get("/api/session")).status_code == 401


async def test_a_reader_of_the_page_sees_who_is_refused_behind_what_the_run_waits_for(
    redis_url: str, bundle: Path, tmp_path: Path
) -> None:
    async with served(redis_url, tmp_path) as world:
        await world.create_run()
    async with (
        served(redis_url, tmp_path, token_keys_file=keys_file(tmp_path)) as world,
        AsyncClient(Connection(world.address, token=token("spot-1", "viewer"))) as spot,
        pages(world, bundle=bundle) as address,
        httpx.AsyncClient(base_url=f"http://{address}", timeout=120) as page,
    ):
        with pytest.raises(PermissionError_):
            await spot.call(spot.runs.JoinRun, JoinRunRequest(node_id="spot-1", max_concurrent_tasks=1))
        await page.post("/login", data={"token": token("ada", "viewer", runs=["run"])})
        _, *behind = (await told(page, "AdminService/Status", run_id="run"))["waits"]
    (refused,) = (wait for wait in behind if wait["reason"] == "callers_refused")
    assert "spot-1: role, 1 times since " in refused["detail"]


async def test_a_form_of_any_size_is_no_way_in(page: httpx.AsyncClient) -> None:
    answer = await page.post("/login", content=b"token=" + b"x" * 100_000)
    assert (answer.status_code, answer.json()["error"]) == (400, "INVALID_ARGUMENT")


async def test_a_sample_is_shown_with_its_texts_and_exported_with_all_of_it(
    world: World, page: httpx.AsyncClient, tmp_path: Path
) -> None:
    store_uri = (tmp_path / "objects").as_uri()
    other = (Turn("user", "What is 2 + 2?\n"), Turn("assistant", "It is four.\n"))
    await record(world, store_uri, num_steps=10, num_nodes=1, samples=(EPISODE, other))
    listed = (await told(page, "SampleService/ListSamples", run_id=world.run_id))["samples"]
    sample_ids = [each["sample_id"] for each in listed]
    shown = (
        await page.get("/api/sample", params={"run_id": world.run_id, "sample_id": sample_ids[0]})
    ).json()
    assert "".join(shown["texts"]) == "".join(turn.text for turn in EPISODE)
    assert [span["role"] for span in shown["turn_spans"]] == [
        "system",
        "user",
        "assistant",
        "tool",
        "assistant",
    ]
    assert [span[2] for span in shown["version_spans"]] == [8, 9]

    asked = json.dumps({"run_id": world.run_id})
    found = (await page.get("/api/search", params={"request": asked, "text": "FOUR"})).json()
    assert ([each["sample_id"] for each in found["samples"]], found["searched"]) == ([sample_ids[1]], 2)
    assert "It is four." in found["samples"][0]["excerpt"]

    lines = (await page.get("/api/export", params={"request": asked, "format": "jsonl"})).text.splitlines()
    assert [json.loads(line)["sample_id"] for line in lines] == sample_ids
    chosen = {"request": asked, "format": "jsonl", "text": "FOUR"}
    (line,) = (await page.get("/api/export", params=chosen)).text.splitlines()
    assert json.loads(line)["sample_id"] == sample_ids[1]
    import pyarrow as pa
    from pyarrow import parquet

    table = await page.get("/api/export", params={"request": asked, "format": "parquet"})
    rows = parquet.read_table(pa.BufferReader(table.content)).to_pylist()
    assert [row["text"] for row in rows] == ["".join(turn.text for turn in each) for each in (EPISODE, other)]
    assert (await page.get("/api/export", params={"request": asked, "format": "csv"})).status_code == 400


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet", ".csv"])
async def test_the_command_exports_the_same(world: World, tmp_path: Path, suffix: str) -> None:
    await record(world, (tmp_path / "objects").as_uri(), num_steps=10, num_nodes=1)
    to = tmp_path / f"samples{suffix}"
    named = ("--join", world.address, "--run-id", world.run_id, "--tokenizer", str(tmp_path))
    ended = await asyncio.to_thread(run, "samples", "export", "--to", str(to), "--limit", "3", *named)
    if suffix == ".csv":
        assert (ended.status, "ends with .jsonl or .parquet" in ended.errors) == (2, True)
        return
    assert (ended.status, "3 samples are in" in ended.output) == (0, True)
    if suffix == ".jsonl":
        texts = ["".join(json.loads(line)["texts"]) for line in to.read_text().splitlines()]
    else:
        from pyarrow import parquet

        texts = [row["text"] for row in parquet.read_table(to).to_pylist()]
    assert texts[0] == "".join(turn.text for turn in EPISODE)
    found = await asyncio.to_thread(run, "samples", "list", "--text", "IS 194", "--json", *named)
    assert {each["item"]["source"] for each in found.json} == {"word-problems"}
    again = await asyncio.to_thread(run, "samples", "export", "--to", str(to), *named)
    assert "it exists already" in again.errors


async def test_without_a_tokenizer_in_the_store_ids_are_shown_and_why(
    world: World, page: httpx.AsyncClient, tmp_path: Path
) -> None:
    store_uri = (tmp_path / "objects").as_uri()
    await record(world, store_uri, num_steps=10, num_nodes=1, samples=(EPISODE,))
    for asset in (tmp_path / "objects").rglob("assets/*"):
        asset.unlink()
    (sample,) = (await told(page, "SampleService/ListSamples", run_id=world.run_id))["samples"]
    shown = (
        await page.get("/api/sample", params={"run_id": world.run_id, "sample_id": sample["sample_id"]})
    ).json()
    assert shown["texts"] is None
    assert "the tokenizer cannot be read" in shown["no_texts"]
    sought = {"request": json.dumps({"run_id": world.run_id}), "text": "eggs"}
    found = (await page.get("/api/search", params=sought)).json()
    assert (found["samples"], found["searched"], found["no_texts"]) == ([], 1, shown["no_texts"])


async def test_a_run_of_100_000_steps_is_thinned_before_it_is_sent(
    world: World, page: httpx.AsyncClient, tmp_path: Path
) -> None:
    await record(
        world, (tmp_path / "objects").as_uri(), num_steps=100_000, num_nodes=64, policies=("solver",)
    )
    names = ["reward_mean", "reward_p10", "reward_p90"]
    answer = await rpc(
        page, "AdminService/ListSteps", run_id=world.run_id, policy_id="solver", names=names, max_points=500
    )
    series = answer.json()
    assert (series["total"], len(series["steps"]), series["steps"][-1]) == (100_000, 500, 100_000)
    assert len(answer.content) < 150_000
    assert (await world.status()).balances[0].verdict == "rollout_bound"
    status = await world.ask(admin.StatusResponse)
    assert sum(node.connected for node in status.nodes) == 63


def test_the_bundle_is_never_committed() -> None:
    ignored = (BUNDLE.parents[3] / ".gitignore").read_text()
    assert "/services/astraflow_dataflow/dashboard/static/" in ignored
