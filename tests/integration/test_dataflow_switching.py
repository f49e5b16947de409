"""Switching plug-ins of a running run: at the end of a step, for every server, with the states that stay theirs."""

import asyncio
import re
from pathlib import Path

import pytest

from astraflow.dataflow.v1 import batch_service_pb2 as batches
from astraflow.dataflow.v1 import run_pb2
from astraflow.dataflow.v1 import run_service_pb2 as runs
from astraflow.errors import ConflictError, InvalidArgumentError, PluginError
from astraflow.recipe.file import parse_recipe
from astraflow_dataflow.store.keys import Keys
from support import cli
from support.dataflow_process import DataflowProcess
from support.dataflow_world import World, served

pytestmark = [pytest.mark.integration, pytest.mark.slow]

EVERY_OTHER = "support.data_plugins:EveryOther"
DROP_ALL = "dataflow.routes=[{name: all, when: {min_reward: -1}, to: drop}]"


async def run_of(world: World) -> run_pb2.Run:
    return (await world.ask(runs.GetRunResponse)).run


async def switch(world: World, *overrides: str) -> run_pb2.Run:
    """Go on with the recipe of the run, with these keys."""
    run = await run_of(world)
    text = parse_recipe(run.switched_recipe_yaml or run.recipe_yaml, overrides=overrides).yaml_text
    return (await world.ask(runs.UpdateRunResponse, recipe_yaml=text)).run


async def test_a_switch_waits_for_the_end_of_the_step_and_holds_on_every_server(
    redis_url: str, tmp_path: Path
) -> None:
    (tmp_path / "second").mkdir()
    async with served(redis_url, tmp_path) as first, served(redis_url, tmp_path / "second") as second:
        tasks = [f"t{number}" for number in range(8)]
        trainer, node = await first.started(*tasks, max_staleness=8)
        second.run_id = first.run_id
        other = await second.node("n2")
        await node.work(2)
        batch = (await trainer.acquire(1)).batch
        (asked,) = (await switch(first, DROP_ALL)).switches
        assert not asked.HasField("effect_time")
        assert asked.changes[0].startswith("dataflow.routes: [] → ")

        # The step is in hand: what comes is judged as before, by either server.
        await node.work(1)
        await other.work(1)
        await first.until(lambda status: not status.trajectories.assembling)
        await first.has_account(in_batch=4, ready=4, dropped={})

        await trainer.ack(batch, batches.BATCH_STAGE_TRAINED)
        await node.work(1)
        await other.work(1)
        await first.until(lambda status: not status.trajectories.assembling)
        await first.has_account(trained=4, ready=4, dropped={"routed_all": 4})
        (held,) = (await run_of(second)).switches
        assert (held.number, dict(held.steps)) == (1, {"solver": 1})
        assert held.HasField("effect_time")


async def test_a_plugin_keeps_its_state_while_its_name_and_settings_stay(process: DataflowProcess) -> None:
    process.start()
    async with process.world(retry_s=20) as world:
        tasks = [f"t{number}" for number in range(6)]
        _, node = await world.started(*tasks, filters=f'["{EVERY_OTHER}"]', max_staleness=8)
        await node.work(1)
        # No step is in hand, so it holds at once. The filter saw one group; a second one stands before it now.
        keep_all = "astraflow_dataflow.plugins.filters.keep_all:KeepAll"
        await switch(world, f'dataflow.filters=["{keep_all}", "{EVERY_OTHER}"]')
        process.kill()
        process.start()
        await node.work(3)
        await world.until(lambda status: not status.trajectories.assembling)
        await world.has_account(ready=4, dropped={"filtered": 4})
        (told,) = (await run_of(world)).switches
        assert dict(told.steps) == {"solver": 0}


async def test_what_cannot_be_switched_is_refused_and_changes_nothing(world: World) -> None:
    await world.started("t1")
    with pytest.raises(ConflictError, match=re.escape("dataflow.group_size: 2 → 4")):
        await switch(world, "dataflow.group_size=4")
    with pytest.raises(PluginError, match="nowhere"):
        await switch(world, 'dataflow.filters=["nowhere:Filter"]')
    with pytest.raises(InvalidArgumentError, match="nothing is to change"):
        await world.ask(runs.UpdateRunResponse)
    assert not (await switch(world)).switches
    # Asked for twice, it is one switch.
    assert len((await switch(world, DROP_ALL)).switches) == 1
    assert len((await switch(world, DROP_ALL)).switches) == 1


async def test_a_switch_that_redis_lost_is_lost_on_the_server_too(world: World) -> None:
    _, node = await world.started("t1", "t2")
    await switch(world, DROP_ALL)
    await node.work(1)
    await world.dataflow.connection.raw("HDEL", Keys(world.run_id).of("run"), "switch", "switches")
    await node.work(1)
    await world.until(lambda status: not status.trajectories.assembling)
    await world.has_account(ready=2, dropped={"routed_all": 2})


async def test_the_command_switches_and_shows_what_holds_since_when(world: World) -> None:
    await world.started("t1")
    arguments = ("runs", "switch", "run", "--set", "dataflow.routes=[]", "--join", world.address)
    # The log of the server, which is in this process, stands beside it.
    assert "nothing differs\n" in (await asyncio.to_thread(cli.run, *arguments)).output
    ended = await asyncio.to_thread(cli.run, *arguments[:3], "--set", DROP_ALL, "--join", world.address)
    line = "switch 1 by anonymous, since solver step 0: dataflow.routes: [] → "
    assert line in ended.output
    shown = await asyncio.to_thread(cli.run, "runs", "show", "run", "--join", world.address)
    assert line in shown.output
