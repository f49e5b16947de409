"""`astraflow top` on a real dataflow server: its pages at two sizes, its keys, a server that is restarted, a pipe."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
from textual.pilot import Pilot
from textual.widgets import Static, TabbedContent

from astraflow._contract.printable import printable
from astraflow.client import Client, RetryPolicy
from astraflow.commands.top import Looking, Top
from astraflow.dataflow.v1.batch_service_pb2 import BATCH_STAGE_TRAINED as TRAINED
from support.cli import run
from support.dataflow_process import DataflowProcess
from support.dataflow_world import World
from support.hostile_texts import HOSTILE, PICTURED

pytestmark = pytest.mark.integration
SIZES = ((80, 24), (200, 60))
VERDICT = "solver is rollout-bound: the trainer waits 60%"


@pytest.fixture
async def served(process: DataflowProcess) -> AsyncIterator[World]:
    """A server of one run with a node at work, whose trainer waited more than half of its first step."""
    process.start()
    async with process.world(retry_s=20) as world:
        trainer, node, batch = await world.bound()
        await trainer.ack(batch, TRAINED, metrics={"wait_s": 6.0, "train_s": 4.0, "reward_mean": 0.25})
        await node.lease(1)
        yield world


@asynccontextmanager
async def shown(address: str, size: tuple[int, int]) -> AsyncIterator[tuple[Top, Pilot[None]]]:
    """The screen of a server, looking often."""
    with Client(address, retry=RetryPolicy(total_s=0)) as client:
        looking = Looking(client)
        first = await asyncio.to_thread(looking.look)
        app = Top(looking, first, address=address, every_s=0.1)
        async with app.run_test(size=size) as pilot:
            yield app, pilot


def text_of(app: Top) -> str:
    """What stands on the screen."""
    strips = app.screen._compositor.render_strips()
    return "\n".join("".join(segment.text for segment in strip) for strip in strips)


async def until(pilot: Pilot[None], holds: Callable[[], object]) -> None:
    """Wait for something to be shown; the test's own timeout is the bound."""
    while not holds():
        await pilot.pause(0.05)


@pytest.mark.parametrize("size", SIZES)
async def test_every_page_fits_and_is_reached_by_its_key(
    served: World, process: DataflowProcess, size: tuple[int, int]
) -> None:
    told = {
        "run": ("is active", VERDICT, "policy", "staleness", "unpublished", "room"),
        "steps": ("solver", "newest", "reward_mean", "0.25", "wait_s", "until step 1"),
        "nodes": ("pool", "node", "n1"),
        "why": ("run run is active", f"solver: {VERDICT.removeprefix('solver is ')}"),
        "events": ("node joined", "n1", "trainer claimed", "solver"),
        "runs": ("created", "file:///nowhere"),
    }
    async with shown(process.address, size) as (app, pilot):
        for number, (page, words) in enumerate(told.items(), 1):
            await pilot.press(str(number))
            await until(pilot, lambda words=words: all(word in text_of(app) for word in words))
            assert app.query_one(TabbedContent).active == page
            assert "live" in str(app.query_one("#head", Static).render())
        assert max(map(len, text_of(app).splitlines())) <= size[0]
        await pilot.press("q")
        await until(pilot, lambda: not app.is_running)


async def test_what_a_node_says_of_a_failure_acts_on_no_screen(
    served: World, process: DataflowProcess
) -> None:
    (lease,) = await served.nodes["n1"].lease(1)
    await served.nodes["n1"].fail(lease, "exception", retryable=False, detail=HOSTILE)
    async with shown(process.address, SIZES[1]) as (app, pilot):
        for page in "123456":
            await pilot.press(page)
            await pilot.pause(0.3)
            assert printable(text_of(app)) == text_of(app)
        await pilot.press("5")
        await until(pilot, lambda: PICTURED.partition("é")[0] in text_of(app))


async def test_the_screen_follows_and_a_pause_stands_still(served: World, process: DataflowProcess) -> None:
    async with shown(process.address, SIZES[1]) as (app, pilot):
        await pilot.press("3")
        await served.node("n2")
        await until(pilot, lambda: "n2" in text_of(app))
        await pilot.press("p")
        await until(pilot, lambda: "paused" in app.head().plain)
        await served.node("n3")
        looked = app._looked_s
        await pilot.pause(0.5)
        assert (app._looked_s == looked, "n3" in text_of(app)) == (True, False)
        await pilot.press("p")
        await until(pilot, lambda: "n3" in text_of(app))


async def test_a_restarted_server_is_missed_and_found_again(served: World, process: DataflowProcess) -> None:
    async with shown(process.address, SIZES[0]) as (app, pilot):
        await asyncio.to_thread(process.kill)
        await until(pilot, lambda: "THE SERVER DOES NOT ANSWER" in app.head().plain)
        assert "solver" in text_of(app), "the last figures stay"
        await asyncio.to_thread(process.start)
        await until(pilot, lambda: "answers again, it was away 1 time" in app.head().plain)


async def test_a_tick_while_the_screen_is_taken_down_is_nothing(
    served: World, process: DataflowProcess
) -> None:
    async with shown(process.address, SIZES[0]) as (app, _):
        await app.screen.remove_children()
        app.action_pause()


async def test_the_run_before_and_after_is_a_key_away(served: World, process: DataflowProcess) -> None:
    await served.create_run(name="other")
    async with shown(process.address, SIZES[0]) as (app, pilot):
        await until(pilot, lambda: app.head().plain.startswith("other at"))
        await pilot.press("left_square_bracket")
        await until(pilot, lambda: app.head().plain.startswith("run at"))
        await pilot.press("right_square_bracket")
        await until(pilot, lambda: app.head().plain.startswith("other at"))


async def test_a_pipe_gets_everything_once(served: World, process: DataflowProcess) -> None:
    page = await asyncio.to_thread(run, "top", "--join", process.address)
    assert all(
        word in page.output
        for word in ("staleness", "n1", "pool", VERDICT, "reward_mean", "node joined", "file:///nowhere")
    )
    found = (await asyncio.to_thread(run, "top", "--join", process.address, "--json")).json
    assert found["status"]["balances"][0]["verdict"] == "rollout_bound"
    assert "wait_s" in [series["name"] for series in found["steps"]["solver"]["series"]]
    assert {"node_joined", "trainer_claimed"} <= {event["kind"] for event in found["events"]["events"]}
    assert found["status"]["nodes"][0]["node_id"] == "n1"


async def test_a_server_without_a_run_says_how_to_start_one(process: DataflowProcess) -> None:
    process.start()
    async with shown(process.address, SIZES[0]) as (app, pilot):
        await until(pilot, lambda: "the server has no run; start one" in text_of(app))
        assert app.head().plain.startswith("no run at")
