"""The admission equation in Redis gives the same figures as the one in Python, state by state."""

from __future__ import annotations

import random

import pytest

from astraflow_dataflow.rules.window import Window, free_groups
from support.dataflow_world import World


@pytest.mark.parametrize(
    "window",
    [
        Window(max_staleness=0, groups_per_step=3, min_acceptance=0.1),
        Window(max_staleness=2, groups_per_step=16, min_acceptance=0.25),
        Window(max_staleness=8, groups_per_step=7, min_acceptance=1.0),
    ],
)
async def test_both_equations_agree(world: World, window: Window) -> None:
    await world.create_run(
        groups_per_step=window.groups_per_step,
        max_staleness=window.max_staleness,
        min_acceptance=window.min_acceptance,
    )
    await world.trainer()
    rng, raw, store = random.Random(window.groups), world.dataflow.connection.raw, world.dataflow.store
    for _ in range(60):
        state = {name: rng.randrange(2 * window.groups) for name in ("outstanding", "ready", "unpublished")}
        acceptance = rng.choice([rng.random(), 1.0, 0.0, 0.1 + 0.2])
        await raw(
            "DEL", "af:{run}:outstanding:solver", "af:{run}:ready:solver", "af:{run}:unpublished:solver"
        )
        if state["outstanding"]:
            await raw("SADD", "af:{run}:outstanding:solver", *range(state["outstanding"]))
        for number in range(state["ready"]):
            await raw("ZADD", "af:{run}:ready:solver", number, f"g{number}")
        await raw("HSET", "af:{run}:unpublished:solver", 1, state["unpublished"])
        await raw("HSET", "af:{run}:policy:solver", "acceptance", repr(acceptance))
        supply = await store.tasks.supply("run")
        assert supply.credit == free_groups(window, acceptance=acceptance, **state), (state, acceptance)
