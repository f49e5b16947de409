"""Curators, filters and selectors of a served run: what they decide, and that their states survive the server."""

import asyncio
from functools import partial
from pathlib import Path

import pytest

from astraflow.plugins import PluginState
from astraflow_dataflow.runs.data_plugins import DataPlugin, with_states
from astraflow_dataflow.store.connection import Connection
from astraflow_dataflow.store.plugin_states import PluginStateStore, StateChange
from support.dataflow_process import DataflowProcess
from support.dataflow_world import World, served, until, until_equal

pytestmark = [pytest.mark.integration, pytest.mark.slow]

OURS = "support.data_plugins"
SKIP_SEEN = f'["{OURS}:SkipSeen"]'
STATE = f"curator {OURS}:SkipSeen"


async def until_state(redis_url: str, name: str, expected: dict[str, bytes]) -> None:
    """Wait until a plug-in's state is saved."""
    async with Connection(redis_url, allow_volatile=True) as connection:
        await until_equal(partial(PluginStateStore(connection).entries, "run", name), expected)


async def test_a_curators_state_survives_a_killed_server(process: DataflowProcess, redis_url: str) -> None:
    process.start()
    async with process.world(retry_s=20) as world:
        trainer, node = await world.started(dataset="Unevaluated", curators=SKIP_SEEN)
        # Four tasks are drawn, odd ones come first.
        assert await node.work(2) == ["train-1", "train-3"]
        await until_state(redis_url, STATE, {"1": b"1", "3": b"1"})
        process.kill()
        process.start()
        assert await node.work(2) == ["train-0", "train-2"]
        await until_state(redis_url, STATE, dict.fromkeys("0123", b"1"))
        await trainer.train(1, base_version=0)

        # Whatever is drawn now was seen, half of it by the server that was killed.
        await world.until(lambda status: "tasks_skipped" in {wait.reason for wait in status.waits})
        assert await node.lease(1, wait_s=0.1) == []


async def test_what_a_curator_skips_is_never_leased_and_its_settings_count(world: World) -> None:
    curators = f'[{{use: "{OURS}:SkipSeen", with: {{modulus: 2, times: 3}}}}]'
    _, node = await world.started(dataset="Unevaluated", curators=curators, max_staleness=8)
    assert await node.work(3) == ["train-1", "train-3", "train-5"]


async def test_curators_that_skip_everything_are_named_and_block_nothing_else(world: World) -> None:
    _, node = await world.started(dataset="Unevaluated", curators=f'["{OURS}:SkipAll"]')

    async def is_named() -> bool:
        assert await node.lease(1, wait_s=0) == []
        return "tasks_skipped" in await world.waits()

    await until(is_named)
    await world.submit("t1")
    assert await node.work(1) == ["t1"]


async def test_a_data_set_with_a_length_ends_there(world: World) -> None:
    _, node = await world.started(dataset=f"{OURS}:FourTasks", max_staleness=8)
    assert await node.work(9) == [f"train-{index}" for index in range(4)]


async def test_a_stateful_filter_goes_on_where_another_server_left_it(redis_url: str, tmp_path: Path) -> None:
    (tmp_path / "second").mkdir()
    async with served(redis_url, tmp_path) as first, served(redis_url, tmp_path / "second") as second:
        await first.create_run(filters=f'["{OURS}:EveryOther"]', max_staleness=8)
        second.run_id = first.run_id
        await first.trainer()
        for number, world in enumerate([first, second] * 3):
            await first.submit(f"t{number}")
            await (await world.node(f"n{number}")).work(1)
            await first.until(lambda status: not status.trajectories.assembling)
        await first.has_account(ready=6, dropped={"filtered": 6})


async def test_a_selector_chooses_the_groups_of_a_batch_and_may_wait_for_others(world: World) -> None:
    selector = f'{{use: "{OURS}:LastFirst", with: {{at_least: 3}}}}'
    trainer, node = await world.started("t1", "t2", "t3", selector=selector, max_staleness=8)
    await node.work(2)
    reply = await trainer.acquire(1, wait_s=0.1)
    assert reply.waiting_for == "selector"
    assert "selector" in await world.waits()
    await node.work(1)
    batch = (await trainer.acquire(1)).batch
    assert [item.task_id for item in batch.items] == ["t3", "t3", "t2", "t2"]
    # Asked again, the step keeps its batch.
    assert (await trainer.acquire(1)).batch == batch
    await world.has_account()


async def test_shadow_plugins_are_asked_counted_and_obeyed_by_nobody(world: World) -> None:
    trainer, node = await world.started(
        dataset="Unevaluated",
        curators=f'[{{use: "{OURS}:SkipAll", shadow: true}}]',
        filters=f'[{{use: "{OURS}:EveryOther", shadow: true}}]',
        selector=f'{{use: "{OURS}:LastFirst", shadow: true}}',
        groups_per_step=1,
        max_staleness=8,
    )
    assert await node.work(4) == [f"train-{index}" for index in range(4)]
    batch = (await trainer.acquire(1)).batch
    assert {item.task_id for item in batch.items} == {"train-0"}
    await world.has_account(in_batch=2, ready=6, dropped={})
    shadows = {shadow.kind: shadow for shadow in (await world.status()).shadows}
    assert {kind: shadow.name for kind, shadow in shadows.items()} == {
        "curator": f"{OURS}:SkipAll",
        "filter": f"{OURS}:EveryOther",
        "selector": f"{OURS}:LastFirst",
    }
    # The curator would have skipped every task, the filter every other group; the selector would have taken the last.
    assert shadows["curator"].asked == shadows["curator"].differs > 0
    assert [(shadows[kind].asked, shadows[kind].differs) for kind in ("filter", "selector")] == [
        (4, 2),
        (1, 1),
    ]
    # A shadow learns like any other.
    state = await world.dataflow.store.plugin_states.entries("run", f"filter {OURS}:EveryOther")
    assert state == {"groups": b"4"}


async def test_two_trainers_that_race_for_a_step_bind_one_batch(world: World) -> None:
    selector = f'"{OURS}:LastFirst"'
    trainer, node = await world.started("t1", "t2", "t3", selector=selector, max_staleness=8)
    await node.work(3)
    replies = await asyncio.gather(*(trainer.acquire(1) for _ in range(8)))
    assert len({reply.batch.batch_id for reply in replies}) == 1
    await world.has_account(in_batch=4, ready=2)


async def test_plugins_that_raise_are_named_and_cost_only_what_they_were_asked(world: World) -> None:
    broken = "support.broken_plugins"
    plugins = {"curators": f'["{broken}:Curator"]', "selector": f'"{broken}:Selector"'}
    trainer, node = await world.started(dataset="Unevaluated", **plugins)
    assert await node.work(2) == ["train-0", "train-1"]
    batch = (await trainer.acquire(1)).batch
    assert [item.task_id for item in batch.items] == ["train-0", "train-0", "train-1", "train-1"]
    waits = await world.waits()
    assert f"{broken}:Curator failed" in waits["curator_failed"].detail
    assert "LookupError: no table of difficulties (broken_plugins.py:" in waits["curator_failed"].detail
    assert "it chose 't9/solver', which is no candidate" in waits["selector_failed"].detail
    await world.has_account()


async def test_a_state_is_saved_only_from_its_newest_revision_and_all_or_nothing(world: World) -> None:
    await world.create_run()
    store = world.dataflow.store.plugin_states
    first = StateChange(name="a", revision=0, entries={"x": b"1", "y": b"2"})
    assert await store.save("run", [first, StateChange(name="b", revision=0, entries={"z": b"3"})])
    stale = StateChange(name="b", revision=0, entries={"z": b"4"})
    assert not await store.save("run", [StateChange(name="a", revision=1, entries={"x": b"9"}), stale])
    assert await store.save("run", [StateChange(name="a", revision=1, entries={"y": b""})])
    assert await store.revisions("run", ["a", "b", "c"]) == [2, 1, 0]
    assert (await store.entries("run", "a"), await store.entries("run", "b")) == ({"x": b"1"}, {"z": b"3"})


async def test_two_servers_that_count_in_one_state_lose_no_count(world: World) -> None:
    await world.create_run()
    store = world.dataflow.store.plugin_states

    async def count(times: int) -> None:
        state = PluginState()
        plugin = DataPlugin(kind="filter", name="m:Count", made=None, state=state)

        async def work() -> None:
            state["n"] = state.get("n", 0) + 1

        for _ in range(times):
            await with_states(store, "run", [plugin], work)

    await asyncio.gather(count(40), count(40))
    assert await store.entries("run", "filter m:Count") == {"n": b"80"}
