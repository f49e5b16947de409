"""A policy that is a snapshot of a trained one: the server announces its draws and keeps what it may play."""

from typing import Any

import pytest

from astraflow.dataflow.v1 import admin_service_pb2 as pb
from astraflow.dataflow.v1 import version_service_pb2 as versions
from astraflow.errors import InvalidArgumentError
from astraflow_dataflow.versions.snapshots import PIN_REASON
from support.dataflow_process import DataflowProcess
from support.dataflow_world import Trainer, World, answered

pytestmark = pytest.mark.integration
POOL = "policies.rival={train: false, model: {snapshot: {of: solver, every_versions: 2, keep: 2}}}"


async def play(world: World, *, overrides: list[str]) -> Trainer:
    """A run with a data set and version 0 of its trained policy."""
    await world.create_run(dataset="Unevaluated", groups_per_step=1, overrides=overrides)
    return await world.trainer()


async def train(
    world: World, trainer: Trainer, *, through: int, since: int = 0, win: float | None = None
) -> None:
    """Take steps up to this one, each of which publishes a version; `win` is the result of their first episodes."""
    node = await world.node()
    for step in range(since + 1, through + 1):
        (lease,) = await answered(lambda: node.lease(1))
        if win is not None:
            episode = node.episode(lease, lease.members[0], version=step - 1)
            episode.draws["rival"], episode.metrics["win"] = 0, win
            await node.outcome(episode)
        await node.complete(lease, version=step - 1)
        await trainer.train(step, base_version=step - 1)


async def announced(world: World, draw: int) -> pb.PolicyStatus:
    """The rival, as soon as this draw is announced."""

    def rival(now: pb.StatusResponse) -> pb.PolicyStatus:
        return next(item for item in now.policies if item.policy_id == "rival")

    return rival(
        await world.until(
            lambda now: rival(now).HasField("version") and rival(now).version.version == draw, within_s=20
        )
    )


async def pins(world: World, **request: Any) -> dict[int, str]:
    """Versions of the trained policy that stay, and why."""
    reply = await world.ask(versions.ListVersionsResponse, policy_id="solver", **request)
    return {pin.version: pin.reason for pin in reply.pins}


async def test_each_draw_is_announced_with_the_version_it_is_of_and_its_pool_is_pinned(world: World) -> None:
    trainer = await play(world, overrides=[POOL])
    first = await announced(world, 0)
    assert (first.version.snapshot_of, first.version.snapshot_version) == ("solver", 0)
    await world.ask(versions.PinVersionResponse, policy_id="solver", version=0, reason="mine")
    await train(world, trainer, through=5)
    drawn = (await announced(world, 2)).version
    assert drawn.snapshot_version in (2, 4)
    (source,) = [
        item
        for item in (await world.ask(versions.ListVersionsResponse, policy_id="solver")).versions
        if item.version == drawn.snapshot_version
    ]
    assert (drawn.manifest_sha256, drawn.step) == (source.manifest_sha256, source.step)
    assert await pins(world) == {0: "mine", 2: PIN_REASON, 4: PIN_REASON}
    await train(world, trainer, since=5, through=6)
    await announced(world, 3)
    await world.until(lambda _: True)
    assert await pins(world) == {0: "mine", 4: PIN_REASON, 6: PIN_REASON}


async def test_a_fixed_version_is_played_from_when_it_is_there(world: World) -> None:
    fixed = "policies.rival={train: false, model: {snapshot: {of: solver, version: 2}}}"
    trainer = await play(world, overrides=[fixed])
    assert (await announced(world, 0)).version.snapshot_version == 0
    await train(world, trainer, through=4)
    assert (await announced(world, 1)).version.snapshot_version == 2


async def test_nobody_publishes_for_a_snapshot(world: World) -> None:
    await play(world, overrides=[POOL])
    await announced(world, 0)
    rival = Trainer(world, "rival")
    await rival.claim()
    with pytest.raises(InvalidArgumentError, match="is a snapshot of another one"):
        await rival.publish(version=1, step=1)


async def test_results_move_the_ratings_once_and_a_new_opponent_starts_where_the_trained_one_is(
    world: World,
) -> None:
    trainer = await play(world, overrides=[POOL])
    await announced(world, 0)
    await world.submit("t", group_size=2)
    node = await world.node()
    (lease,) = await node.lease(1)
    for member, score in ((0, 1.0), (1, 0.0)):
        episode = node.episode(lease, member)
        episode.draws["rival"], episode.metrics["win"] = 0, score
        assert [await node.outcome(episode) for _ in range(2)] == ["ACCEPTED", "DUPLICATE"]
    # 8 points for a win against an equal; then a loss as the better one costs 8.37.
    own, first = (await announced(world, 0)).ratings
    assert (own.HasField("version"), own.episodes, first.version, first.episodes) == (False, 2, 0, 2)
    assert own.rating == pytest.approx(999.632, abs=1e-3)
    assert own.rating + first.rating == pytest.approx(2000)
    await trainer.release()


@pytest.mark.slow
@pytest.mark.timeout(90)
async def test_a_server_that_was_killed_goes_on_with_the_same_draws(process: DataflowProcess) -> None:
    process.start()
    async with process.world(retry_s=30) as world:
        trainer = await play(world, overrides=[POOL])
        await announced(world, 0)
        await train(world, trainer, through=1, win=1.0)
        process.kill()
        process.start()
        assert [item.episodes for item in (await answered(lambda: announced(world, 0))).ratings] == [1, 1]
        await train(world, trainer, since=1, through=3)
        assert (await announced(world, 1)).version.snapshot_version in (0, 2)
        assert set(await pins(world)) == {0, 2}
