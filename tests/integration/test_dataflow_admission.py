"""The staleness window in Redis: never over the equation, never a group less than it allows."""

import random

import pytest

from astraflow_dataflow.rules.window import Window
from support.dataflow_world import World

_SLACK = 1e-9  # of the rounding of the acceptance average


class Seeded:
    """A run whose window is filled by hand."""

    def __init__(self, world: World, window: Window) -> None:
        self._store, self._raw, self.window = world.dataflow.store, world.dataflow.connection.raw, window

    async def fill(self, *, outstanding: int, ready: int, unpublished: int, acceptance: float) -> None:
        """Put the run into a state."""
        prefix = "af:{run}:"
        await self._raw(
            "DEL", *(f"{prefix}{name}:solver" for name in ("outstanding", "ready", "unpublished"))
        )
        if outstanding:
            await self._raw("SADD", f"{prefix}outstanding:solver", *(f"held-{i}" for i in range(outstanding)))
        for number in range(ready):
            await self._raw("ZADD", f"{prefix}ready:solver", number, f"g{number}")
        await self._raw("HSET", f"{prefix}unpublished:solver", 1, unpublished)
        await self._raw("HSET", f"{prefix}policy:solver", "acceptance", repr(acceptance))

    def fits(self, *, outstanding: int, ready: int, unpublished: int, acceptance: float) -> bool:
        """The equation."""
        survives = max(acceptance, self.window.min_acceptance)
        return outstanding + (ready + unpublished - self.window.groups) / survives <= _SLACK

    async def credit(self) -> int:
        """What may be leased now."""
        return (await self._store.tasks.supply("run")).credit


@pytest.fixture(
    params=[(0, 3, 0.1), (2, 16, 0.25), (8, 7, 1.0)], ids=["on policy", "two behind", "eight behind"]
)
async def seeded(world: World, request: pytest.FixtureRequest) -> Seeded:
    return await of_window(world, *request.param)


async def of_window(world: World, max_staleness: int, groups_per_step: int, min_acceptance: float) -> Seeded:
    """A run with version 0 and this window."""
    shape = {"max_staleness": max_staleness, "groups_per_step": groups_per_step}
    await world.create_run(**shape, min_acceptance=min_acceptance)
    await world.trainer()
    return Seeded(world, Window(policy_id="solver", **shape, min_acceptance=min_acceptance))


async def test_what_is_free_fits_the_window_and_one_more_does_not(seeded: Seeded) -> None:
    rng = random.Random(seeded.window.groups)
    for _ in range(60):
        counts = {
            name: rng.randrange(2 * seeded.window.groups) for name in ("outstanding", "ready", "unpublished")
        }
        acceptance = rng.choice([rng.random(), 1.0, 0.0, 0.1 + 0.2])
        await seeded.fill(**counts, acceptance=acceptance)
        free, outstanding = await seeded.credit(), counts.pop("outstanding")
        if free:
            assert seeded.fits(outstanding=outstanding + free, acceptance=acceptance, **counts)
        assert not seeded.fits(outstanding=outstanding + free + 1, acceptance=acceptance, **counts)


@pytest.mark.parametrize("lag", [0, 1, 2, 5])
async def test_a_node_behind_leases_within_the_window_of_a_smaller_staleness(
    seeded: Seeded, world: World, lag: int
) -> None:
    node, window = await world.node(max_concurrent_tasks=1000), seeded.window
    await world.dataflow.connection.raw("HSET", "af:{run}:policy:solver", "version", lag)
    await world.submit(*(f"t{number}" for number in range(2 * window.groups)))
    node.serving = {"solver": 0}
    leases = await node.lease(256, wait_s=0)
    expected = window.groups - lag * window.groups_per_step if lag <= window.max_staleness else 0
    assert len(leases) == expected


async def test_rounding_of_the_average_costs_no_group(world: World) -> None:
    seeded = await of_window(world, 0, 3, 0.1)
    await seeded.fill(outstanding=0, ready=0, unpublished=0, acceptance=0.1 + 0.2)
    assert await seeded.credit() == 10


async def test_the_acceptance_average_stays_a_share(world: World) -> None:
    dropping = "[astraflow_dataflow.plugins.filters.drop_zero_advantage:DropZeroAdvantage]"
    _, node = await world.started(filters=dropping, groups_per_step=1, max_staleness=1, min_acceptance=0.05)
    raw, rng, seen = world.dataflow.connection.raw, random.Random(7), set()
    for number in range(24):
        await world.submit(f"t{number}")
        kept = rng.random() < 0.3
        await node.work(**({} if kept else {"reward": 1.0}))
        seen.add(float(await raw("HGET", "af:{run}:policy:solver", "acceptance")))  # type: ignore[arg-type]
        await raw("DEL", "af:{run}:ready:solver")
    assert 0.0 <= min(seen) <= max(seen) <= 1.0
    assert len(seen) > 8, "the average moved"
