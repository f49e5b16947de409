"""The metrics page of a server does not grow with trajectories and nodes, and forgets a run that is deleted."""

import asyncio

import pytest

from astraflow.dataflow.v1 import run_service_pb2 as runs
from support.dataflow_world import World

MOST_SERIES = 5000


def page(world: World) -> list[str]:
    """The series of the page."""
    return [
        line for line in world.dataflow.metrics.render().decode().splitlines() if not line.startswith("#")
    ]


@pytest.mark.parametrize(
    ("num_groups", "num_nodes"),
    [
        pytest.param(20, 30, id="few"),
        pytest.param(
            5000, 1000, marks=[pytest.mark.soak, pytest.mark.timeout(1800)], id="10,000 trajectories"
        ),
    ],
)
async def test_the_page_is_as_long_with_many_as_with_one(
    world: World, num_groups: int, num_nodes: int
) -> None:
    _, first = await world.started(dataset="Counting", groups_per_step=num_groups)
    await first.make_ready(2)
    await world.status()
    before = len(page(world))
    for number in range(2, num_nodes, 20):
        await asyncio.gather(
            *(world.node(f"n{name}") for name in range(number, min(number + 20, num_nodes + 1)))
        )
    await first.make_ready(num_groups - 2)
    status = await world.status()
    assert (status.trajectories.ingested, len(status.nodes)) == (2 * num_groups, num_nodes)
    assert len(page(world)) <= before + 20 < MOST_SERIES, "a label has a value for each of something"


async def test_a_wait_is_on_the_page_until_it_is_over(world: World) -> None:
    await world.create_run()
    await world.status()
    assert any('reason="no_node"' in line for line in page(world))
    await world.trainer()
    await world.node()
    await world.status()
    assert not any('reason="no_trainer"' in line for line in page(world))


async def test_a_deleted_run_leaves_the_page(world: World) -> None:
    await world.started()
    await world.status()
    assert any('run="run"' in line for line in page(world))
    await world.ask(runs.DeleteRunResponse, force=True)
    assert not any('run="run"' in line for line in page(world))
