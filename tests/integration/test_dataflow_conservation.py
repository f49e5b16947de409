"""Conservation: after any history of pushes, failures, batches and restarts every trajectory is in one place."""

from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from support.dataflow_walk import walking
from support.dataflow_world import answered, served
from support.valkey import ValkeyServer


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.timeout(120)
async def test_every_trajectory_is_in_one_place_after_any_history(
    redis_url: str, tmp_path: Path, seed: int
) -> None:
    async with walking(redis_url, tmp_path, seed) as walk:
        await walk.run(600)
        while not walk.trained:  # a walk that never trains proves nothing; its test's timeout bounds it
            await walk.run(100)
        walk.check_ids()
        await walk.check_traces()


@pytest.mark.timeout(120)
async def test_a_history_goes_on_over_server_restarts_as_if_nothing_happened(
    redis_url: str, tmp_path: Path
) -> None:
    async with AsyncExitStack() as first:
        walk = await first.enter_async_context(walking(redis_url, tmp_path, 77))
        await walk.run(200)
    for _ in range(4):
        async with served(redis_url, tmp_path) as world:
            world.run_id, world.nodes = "run", walk.world.nodes
            walk.world = world
            for owner in [*walk.nodes, walk.trainer, *(node for node, _ in [*walk.leases, *walk.pushed])]:
                owner.world = world  # type: ignore[union-attr]
            await walk.check()
            await walk.run(100)
    walk.check_ids()


async def test_a_step_that_redis_lost_is_not_counted_as_trained_for_ever(
    own_valkey: ValkeyServer, tmp_path: Path
) -> None:
    async with served(own_valkey.url, tmp_path) as world:
        trainer, node = await world.started(*"abcd")
        await node.make_ready(2)
        size = own_valkey.log_bytes
        await trainer.train(1, base_version=0)
        assert (await world.status()).trajectories.trained > 0
        own_valkey.kill()
        own_valkey.truncate_log(size)
        own_valkey.start()
        lost = await answered(world.status)
        assert (lost.trajectories.trained, lost.trajectories.conservation_error) == (0, 0)
        await trainer.claim()
        await trainer.train(1, base_version=0)
        assert (await world.status()).trajectories.conservation_error == 0


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(1000, 1200))
@pytest.mark.timeout(600)
async def test_long_histories_conserve(redis_url: str, tmp_path: Path, seed: int) -> None:
    async with walking(redis_url, tmp_path, seed) as walk:
        await walk.run(1000)
        walk.check_ids()
