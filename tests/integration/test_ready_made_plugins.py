"""The ready-made curators, filters and selectors in a served run: together, in any order, and after a kill."""

import itertools
from collections.abc import Sequence
from dataclasses import replace

import pytest

from astraflow.plugins import TaskSpec
from astraflow_dataflow.store.connection import Connection
from astraflow_dataflow.store.plugin_states import PluginStateStore
from support.dataflow_process import DataflowProcess
from support.dataflow_world import Unevaluated, World, until

pytestmark = [pytest.mark.integration, pytest.mark.slow]

BUILT_IN = "astraflow_dataflow.plugins"
CURATORS = {
    "greso:Greso": "{easy_floor: 0.2}",
    "skip_solved:SkipSolved": "{memory: 0.0, problem: id}",
    "pass_rate_buckets:PassRateBuckets": "{shares: [1, 1, 1]}",
    "difficulty_curriculum:DifficultyCurriculum": "{width: 1000, groups: 1}",
    "mix_sources:MixSources": "{weights: {even: 1, odd: 1}}",
}
FILTERS = {
    "drop_zero_advantage:DropZeroAdvantage": "{}",
    "length:Length": "{max_tokens: 4}",
    "overlong:Overlong": "{}",
    "duplicates:Duplicates": "{max_share: 0.9}",
    "reward_range:RewardRange": "{lowest: 0.2, highest: 0.8}",
    "metric_range:MetricRange": "{metric: none}",
    "agreement:Agreement": "{}",
}
SELECTORS = (
    "edf:Edf",
    "fifo:Fifo",
    "freshest_first:FreshestFirst",
    "balance_sources:BalanceSources",
    "balance_lengths:BalanceLengths",
)


class Graded(Unevaluated):
    """Tasks of two sources in turn, all of one difficulty."""

    def train(self, index: int) -> TaskSpec:
        task = super().train(index)
        assert task is not None
        source = "odd" if index % 2 else "even"
        return replace(task, source=source, data={**task.data, "difficulty": 1})


def entries(room: str, settings: dict[str, str], names: Sequence[str]) -> str:
    """A recipe's list of plug-ins."""
    made = [f'{{use: "{BUILT_IN}.{room}.{name}", with: {settings[name]}}}' for name in names]
    return f"[{', '.join(made)}]"


async def test_states_of_all_curators_survive_a_killed_server(
    process: DataflowProcess, redis_url: str
) -> None:
    names = [f"curator {BUILT_IN}.curators.{name}" for name in CURATORS]

    async def states() -> dict[str, dict[str, bytes]]:
        async with Connection(redis_url, allow_volatile=True) as connection:
            store = PluginStateStore(connection)
            return {name: await store.entries("run", name) for name in names}

    async def observed() -> bool:
        saved = await states()
        # Two groups of equal rewards each: two problems, and the counts of proposals and of the version.
        return [len(saved[name]) for name in names] == [4, 2, 2, 3, 1]

    process.start()
    async with process.world(retry_s=20) as world:
        curators = entries("curators", CURATORS, list(CURATORS))
        _, node = await world.started(dataset=f"{__name__}:Graded", curators=curators, max_staleness=8)
        first = await node.work(2, reward=1.0)
        await until(observed)
        before = await states()
        process.kill()
        process.start()
        second = await node.work(2, reward=1.0)
        assert not set(first) & set(second)

        async def went_on() -> bool:
            return len((await states())[names[1]]) == 4

        await until(went_on)
        after = await states()
        assert before[names[1]].items() <= after[names[1]].items()
        assert int(after[names[0]]["window"].split(b'"groups":')[1].split(b",")[0]) == 4


@pytest.mark.parametrize("seed", range(3))
async def test_three_of_each_work_together_in_any_order(world: World, seed: int) -> None:
    orders = list(itertools.permutations(list(CURATORS)[:3])), list(itertools.permutations(list(FILTERS)[:3]))
    curators, filters = (order[5 * seed % 6] for order in orders)
    trainer, node = await world.started(
        dataset=f"{__name__}:Graded",
        curators=entries("curators", CURATORS, curators),
        filters=entries("filters", FILTERS, filters),
        selector=f'"{BUILT_IN}.selectors.{SELECTORS[seed]}"',
        max_staleness=8,
    )
    # Rewards 0 and 1 pass; equal rewards and long ones do not.
    for changes in ({}, {"reward": 1.0}, {"num_response": 5}, {}):
        await node.work(1, **changes)
    batch = (await trainer.acquire(1)).batch
    assert len({item.task_id for item in batch.items}) == 2
    assert not {"curator_failed", "filter_failed", "selector_failed"} & set(await world.waits())
    await world.has_account(in_batch=4, dropped={"filtered": 4})


@pytest.mark.parametrize("selector", SELECTORS)
async def test_all_filters_and_each_selector_make_a_batch(world: World, selector: str) -> None:
    trainer, node = await world.started(
        dataset=f"{__name__}:Graded",
        filters=entries("filters", FILTERS, list(FILTERS)),
        selector=f'"{BUILT_IN}.selectors.{selector}"',
        max_staleness=8,
    )
    await node.make_ready(3)
    batch = (await trainer.acquire(1)).batch
    assert sorted({item.task_id for item in batch.items}) == ["train-0", "train-1"]
    assert "selector_failed" not in await world.waits()


async def test_responses_that_are_equal_are_seen_whatever_the_client_wrote(world: World) -> None:
    filters = entries("filters", {"duplicates:Duplicates": "{max_share: 0.4}"}, ["duplicates:Duplicates"])
    _, node = await world.started("t1", "t2", filters=filters, max_staleness=8)
    same, other = await node.lease(2)
    for member in same.members:
        episode = node.episode(same, member)
        episode.trajectories[0].header.response_digest = 7 + member
        assert await node.outcome(episode) == "ACCEPTED"
    for member in other.members:
        await node.push(node.episode(other, member, num_response=4 + member))
    await world.until(lambda status: not status.trajectories.assembling)
    await world.has_account(ready=2, dropped={"filtered": 2})
