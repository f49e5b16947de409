"""A node that cannot work says so: exit status, one line with the remedy, and a server that never counted on it."""

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from astraflow.client import AsyncClient, Connection
from astraflow.dataflow.v1 import run_pb2, run_service_pb2
from support.dataflow_world import World, bundle_of, recipe_text, served
from support.node_process import NodeProcess, WeightPublisher, node_of, tiny_policy
from support.redis_content import redis_content
from support.scripted_daemons import ScriptedNode, serving
from support.scripted_dataflow import POLICY, RECIPE, RUN_ID, ScriptedDataflow, a_run, running
from support.tokens import keys_file, token

# The other Redis has the dataflow server's own tests: nodes never see it.
pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

OPERATOR, VIEWER, NODE = token("ops", "operator"), token("watcher", "viewer"), token("node", "rollout")


@dataclass(frozen=True, kw_only=True)
class Case:
    """A run, how the node is started, and what it must say."""

    raas: Mapping[str, str] = field(default_factory=dict)
    code: str = ""
    store: str = "file:///nowhere"
    options: tuple[str, ...] = ()
    token: str | None = NODE
    runs: tuple[str, ...] = ("run",)
    says: tuple[str, ...]
    status: int = 2


CASES = {
    "a plug-in is not installed": Case(
        raas={"reward": "nowhere_installed.rewards:Best"}, says=("PLUGIN_FAILED", "nowhere_installed")
    ),
    "the recipe's code may not run here": Case(
        raas={"reward": "recipe:Own"}, code="class Own: ...", says=("PLUGIN_FAILED", "--allow-recipe-code")
    ),
    "the recipe's code needs a library": Case(
        raas={"reward": "recipe:Own"},
        code="import absent_library",
        options=("--allow-recipe-code",),
        says=("PLUGIN_FAILED", "absent_library"),
    ),
    "the workflow cannot run on this machine": Case(
        raas={"workflow": "support.node_plugins:CannotBeMade"},
        says=("PLUGIN_FAILED", "no GPU on this machine; start the node where there is one"),
    ),
    "the engine is not installed": Case(
        options=("--engine", "sglang"),
        says=("INVALID_ARGUMENT", "no module sglang", "--engine-python"),
    ),
    "the engine's interpreter does not exist": Case(
        options=("--engine", "sglang", "--engine-python", "/nowhere/python"),
        says=("INVALID_ARGUMENT", "/nowhere/python", "No such file"),
    ),
    "the run does not exist": Case(
        options=("--run-id", "elsewhere", "--join-timeout-s", "0.2"),
        says=("UNAVAILABLE", "no run 'elsewhere' on this server, which has run", "check --run-id"),
        status=75,
    ),
    "there are several runs": Case(
        runs=("run", "second"), says=("INVALID_ARGUMENT", "several runs", "give --run-id")
    ),
    "the token is missing": Case(token=None, says=("UNAUTHENTICATED", "give --token-file")),
    "the token is no token": Case(
        token="guess", says=("UNAUTHENTICATED", "no JSON web token", "give --token-file")
    ),
    "the token is for something else": Case(
        token=VIEWER, says=("PERMISSION_DENIED", "role viewer", "give --token-file")
    ),
    "the store cannot be used": Case(
        store="s3://bucket/runs/../others", says=("STORE_REFUSED", "s3://bucket/runs/../others")
    ),
}
QUICK = {
    *("a plug-in is not installed", "the engine is not installed"),
    *("the run does not exist", "the token is missing"),
}
"""The kinds of refusal, one each, for every run of the tests; the whole table is for .ci/run."""


@pytest.fixture
async def world(redis_url: str, tmp_path: Path) -> AsyncIterator[World]:
    """A server that asks for tokens; its client is the operator."""
    async with (
        served(redis_url, tmp_path, token_keys_file=keys_file(tmp_path)) as world,
        AsyncClient(Connection(world.address, token=OPERATOR)) as client,
    ):
        world.client = client
        yield world


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.ci) for name in CASES]
)
async def test_a_node_that_cannot_work_says_why_and_leaves_no_trace(
    world: World, redis_url: str, tmp_path: Path, name: str
) -> None:
    case = CASES[name]
    for run_id in case.runs:
        await create(world, run_id, case)
    before = redis_content(redis_url)
    options = list(case.options)
    if case.token is not None:
        (tmp_path / "token").write_text(case.token)
        options += ["--token-file", str(tmp_path / "token")]
    async with node_of(world.address, tmp_path, *options) as node:
        await refuses(node, case.status, *case.says)
    assert redis_content(redis_url) == before


async def create(world: World, run_id: str, case: Case) -> None:
    code = bundle_of(case.code) if case.code else None
    text = recipe_text(name=run_id, raas=case.raas)
    run = run_pb2.Run(run_id=run_id, recipe_yaml=text, code=code, store_uri=case.store)
    await world.ask(run_service_pb2.CreateRunResponse, run=run)


async def refuses(node: NodeProcess, status: int, *fragments: str) -> None:
    """It ends with this status, and its last word is one line with all of these."""
    assert await node.ends_with() == status
    (failure,) = node.events("daemon.failed")
    line = f"{failure.get('reason')}: {failure.get('message')}"
    assert [fragment for fragment in fragments if fragment not in line] == [], line


async def test_a_recipe_of_a_newer_release_is_refused(tmp_path: Path) -> None:
    script = ScriptedDataflow(run=a_run(recipe_yaml=f"schema_version: 2\n{RECIPE}"))
    async with running(script) as server, node_of(server.address, tmp_path) as node:
        await refuses(node, 2, "INVALID_RECIPE", "schema_version")
    assert script.joins == []


async def test_weights_of_a_newer_release_end_a_node_that_serves_nothing_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("astraflow_weights.versions.manifest.SCHEMA_VERSION", 99)
    weights = WeightPublisher.open(
        tmp_path / "store", run_id=RUN_ID, policy_id=POLICY, checkpoint=tiny_policy(tmp_path / "policy")
    )
    run = a_run(store_uri=(tmp_path / "store").as_uri())
    script = ScriptedDataflow(run=run, versions=[weights.publish()])
    async with running(script) as server, node_of(server.address, tmp_path) as node:
        await refuses(
            node, 3, "INCOMPATIBLE", "schema version 99", "a later release reads it: go on with that one"
        )
    assert all(offered.tasks == 0 for offered in script.credits)


async def test_a_node_whose_name_is_taken_ends_and_disturbs_nobody(redis_url: str, tmp_path: Path) -> None:
    async with served(redis_url, tmp_path) as world:
        await world.create_run()
        holder = await world.node("node-1")
        await holder.report(connected_ms=600_000)
        async with node_of(world.address, tmp_path) as node:
            await refuses(node, 2, "INVALID_ARGUMENT", "node-1", "choose another --node-id")
        assert (await world.status()).nodes[0].restarts == 0
        await holder.report(connected_ms=1000)


async def test_an_address_that_is_no_dataflow_server_is_named(tmp_path: Path) -> None:
    async with serving(ScriptedNode()) as address, node_of(address, tmp_path) as node:
        await refuses(node, 2, "UNIMPLEMENTED", "is no dataflow server", "check --join")
