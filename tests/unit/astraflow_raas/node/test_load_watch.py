"""Load that is measured, and load that an engine does not tell."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import structlog

from astraflow_kit.metrics import Metrics
from astraflow_raas.engine.base import EngineFaulty, EngineLoad
from astraflow_raas.engine.slots import EngineSlots
from astraflow_raas.node.load_watch import LoadWatch
from astraflow_raas.policies.served_policy import ServedPolicy
from support.fake_engine import IDLE, FakeEngine
from support.raas_parts import served_policy
from support.scripted_dataflow import eventually


@asynccontextmanager
async def watched(policy: ServedPolicy) -> AsyncIterator[LoadWatch]:
    watch = LoadWatch(
        {"solver": policy},
        episodes=lambda: 8,
        most_episodes=512,
        group_size=8,
        episode_timeout_s=60.0,
        every_s=0.01,
    )
    running = asyncio.create_task(watch.run())
    try:
        yield watch
    finally:
        await watch.stop(deadline_s=1.0)
        await running


async def test_the_allowance_follows_the_engine(tmp_path: Path) -> None:
    engine = FakeEngine(slots=EngineSlots(8))
    policy, changes = await served_policy(tmp_path, engine), list[int]()
    async with watched(policy) as watch:
        watch.on_change = lambda: changes.append(watch.allowance.episodes)
        assert watch.allowance.episodes == 16, (
            "its places and a queue, in whole groups, before the first look"
        )
        engine.slots = EngineSlots(80)
        await eventually(lambda: changes == [104], what="another size")
        policy.engines[0].lost()
        assert (watch.allowance.episodes, watch.loads) == (512, [])


async def test_a_report_counts_as_means_and_is_shown(tmp_path: Path) -> None:
    engine = FakeEngine(slots=EngineSlots(64))
    engine.reported_load = EngineLoad(running=6, waiting=2, kv_usage=0.5, tokens_per_s=120.0)
    metrics = Metrics()
    async with watched(await served_policy(tmp_path, engine)) as watch:
        await eventually(lambda: watch.loads[0].running, what="the first look")
        (load,) = watch.loads
        assert (load.running, load.waiting, load.slots) == (6, 2, 64)
        assert (load.kv_usage, load.tokens_per_s, load.fault) == (0.5, 120.0, "")
        assert watch.allowance.bounded_by == "engine_kv"
        watch.publish_gauges(metrics)
    assert 'astraflow_raas_engine_sequences{policy="solver",state="running"} 6.0' in metrics.render().decode()


async def test_an_engine_that_tells_nothing_is_counted_by_the_node_and_the_reason_said_once(
    tmp_path: Path,
) -> None:
    engine, why = FakeEngine(slots=EngineSlots(8)), EngineFaulty("it reports token_usage nan")
    engine.reported_load = why
    with structlog.testing.capture_logs() as lines:
        async with watched(await served_policy(tmp_path, engine)) as watch:
            await eventually(lambda: watch.loads[0].fault, what="the first look")
            await asyncio.sleep(0.05)
            (load,) = watch.loads
            assert (load.fault, load.HasField("kv_usage")) == (why.message, False)
            assert watch.allowance.episodes == 16
            engine.reported_load = IDLE
            await eventually(lambda: not watch.loads[0].fault, what="the report counts again")
    events = [line["event"] for line in lines if str(line["event"]).startswith("engine.load")]
    assert events == ["engine.load_unknown", "engine.load_known"]
