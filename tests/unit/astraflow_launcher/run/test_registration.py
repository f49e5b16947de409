"""A run is created once, continued when more steps are wanted than it has, and left alone otherwise."""

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from astraflow.client import AsyncClient
from astraflow.dataflow.v1 import run_pb2
from astraflow_launcher.run.folder import RunRecord, open_run_folder
from astraflow_launcher.run.registration import register_run
from astraflow_weights.errors import StateInDoubt
from support.recipes import tiny_recipe
from support.scripted_daemons import ScriptedServer, serving

ACTIVE, FINISHED = run_pb2.RUN_STATE_ACTIVE, run_pb2.RUN_STATE_FINISHED


STEPS = "run.steps=4"


@pytest.fixture
def script() -> ScriptedServer:
    return ScriptedServer()


@pytest.fixture
async def client(script: ScriptedServer) -> AsyncIterator[AsyncClient]:
    async with serving(script) as address, AsyncClient(address) as connected:
        yield connected


async def _register(
    client: AsyncClient, folder: Path, *overrides: str, accept_data_loss: bool = False
) -> None:
    loaded = tiny_recipe(STEPS, *overrides)
    opened = open_run_folder(loaded, data_dir=folder)
    with opened.lock:
        await register_run(
            client, folder=opened, loaded=loaded, store_uri=None, accept_data_loss=accept_data_loss
        )


async def test_a_new_run_is_created_with_its_store_and_left_active(
    script: ScriptedServer, client: AsyncClient, tmp_path: Path
) -> None:
    script.status.state = ACTIVE
    await _register(client, tmp_path)
    [run] = script.created
    assert (run.run_id, run.store_uri) == ("tiny", (tmp_path / "store").as_uri())
    assert script.updates == []


@pytest.mark.parametrize("key", ["run.steps", "policies.solver.steps"])
@pytest.mark.parametrize("state", [run_pb2.RUN_STATE_FINISHING, FINISHED])
async def test_a_run_that_ended_before_the_wanted_steps_is_continued_under_its_own_recipe(
    script: ScriptedServer, client: AsyncClient, tmp_path: Path, state: run_pb2.RunState.ValueType, key: str
) -> None:
    script.status.state = ACTIVE
    await _register(client, tmp_path)
    script.status.state, script.finished_step = state, 4
    await _register(client, tmp_path, f"{key}=9")
    assert script.updates == [ACTIVE]
    assert {run.recipe_yaml for run in script.created} == {tiny_recipe(STEPS).yaml_text}


async def test_a_run_that_has_all_wanted_steps_stays_finished(
    script: ScriptedServer, client: AsyncClient, tmp_path: Path
) -> None:
    script.status.state, script.finished_step = FINISHED, 4
    await _register(client, tmp_path)
    assert script.updates == []


async def test_another_run_of_that_name_is_refused_unless_the_loss_is_accepted(
    script: ScriptedServer, client: AsyncClient, tmp_path: Path
) -> None:
    script.identity, script.status.state = "a" * 32, ACTIVE
    for _ in range(2):
        await _register(client, tmp_path)
    (tmp_path / "work" / "trainer-solver" / "checkpoints" / "step-000000000003").mkdir(parents=True)
    script.identity = "b" * 32
    with pytest.raises(StateInDoubt, match=r"identity a+, with checkpoints up to step 3, .* of identity b+"):
        await _register(client, tmp_path)
    assert len(script.created) == 2
    await _register(client, tmp_path, accept_data_loss=True)
    assert len(script.created) == 3
    assert RunRecord(**json.loads((tmp_path / "run.json").read_text())).identity == "a" * 32


async def test_a_run_that_redis_forgot_before_it_was_trained_is_created_again(
    script: ScriptedServer, client: AsyncClient, tmp_path: Path
) -> None:
    script.identity, script.status.state = "a" * 32, ACTIVE
    await _register(client, tmp_path)
    script.forgotten, script.identity = True, "b" * 32
    await _register(client, tmp_path)
    assert len(script.created) == 2
    assert RunRecord(**json.loads((tmp_path / "run.json").read_text())).identity == "b" * 32
    ledger = tmp_path / "work" / "trainer-solver" / "ledger.jsonl"
    ledger.parent.mkdir(parents=True)
    ledger.write_text('{"step": 1}\n')
    with pytest.raises(StateInDoubt, match=r"identity b+, .* has no such run"):
        await _register(client, tmp_path)
    assert len(script.created) == 2
