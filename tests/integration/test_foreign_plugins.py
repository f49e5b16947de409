"""Plug-ins of a recipe that hang, end their process or take all memory: their own run waits by name, others do not."""

import asyncio
import os
import signal
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from astraflow.dataflow.v1 import admin_service_pb2 as admin
from astraflow.dataflow.v1 import run_pb2
from astraflow.dataflow.v1 import run_service_pb2 as runs
from astraflow.errors import NotFoundError, PluginError
from astraflow_dataflow.store.connection import Connection
from astraflow_dataflow.store.plugin_states import PluginStateStore
from support.dataflow_world import World, answered, bundle_of, recipe_text, served, until, until_equal
from support.redis_content import redis_content

pytestmark = [pytest.mark.integration, pytest.mark.slow]

HEAD = """
import os, signal, sys, time
from astraflow.plugins import Message, TaskSpec

class Data:
    def __init__(self, seed: int) -> None:
        {constructor}
    def train(self, index):
        {train}
        return TaskSpec(f"train-{{index}}", (Message("user", "x"),), {{"id": index}})
    def heldout(self, index):
        return None
{more}
"""
STOP_SELF = "os.kill(os.getpid(), signal.SIGSTOP)"
LIMITS = {"plugin_start_timeout_s": 4.0, "plugin_call_timeout_s": 2.0, "plugin_memory_mb": 512}


def source(*, constructor: str = "pass", train: str = "pass", more: str = "") -> str:
    """A recipe.py with a data set `Data`."""
    return HEAD.format(constructor=constructor, train=train, more=more)


async def create(world: World, code: str, *, name: str = "hostile", **recipe: object) -> None:
    """Create a run of such a recipe, and work on it from now on."""
    text = recipe_text(name=name, dataset="recipe:Data", **recipe)  # type: ignore[arg-type]
    run = run_pb2.Run(run_id=name, recipe_yaml=text, store_uri="file:///nowhere", code=bundle_of(code))
    await world.ask(runs.CreateRunResponse, run=run, timeout_s=60)
    world.run_id = name


@pytest.fixture
async def world(redis_url: str, tmp_path: Path) -> AsyncIterator[World]:
    """A server that runs the code of recipes, with short deadlines."""
    async with served(redis_url, tmp_path, allow_recipe_code=True, **LIMITS) as world:
        yield world


async def goes_on_during(world: World, run_id: str, pending: "asyncio.Future[None]") -> None:
    """The server says what is with another run, again and again, until something is over."""
    count = 0
    while not pending.done():
        await world.ask(admin.StatusResponse, run_id=run_id)
        await asyncio.sleep(0.01)
        count += 1
    # One that stands still answers the call that came first, and the one that waited.
    assert count > 5
    await pending


NOT_MADE: dict[str, tuple[str, tuple[str, ...]]] = {
    "sleeps in its constructor": (
        source(constructor="time.sleep(1000)"),
        ("dataset 'recipe:Data': its constructor did not return", "plugin_start_timeout_s 4 s", "larger"),
    ),
    "loops at its import": (
        source(more="while True: pass"),
        ("the import of recipe:Data did not return", "plugin_start_timeout_s 4 s"),
    ),
    "keeps the lock of the interpreter": (
        source(more="9**9**9"),
        ("the import of recipe:Data did not return",),
    ),
    "stops itself": (source(constructor=STOP_SELF), ("its constructor did not return",)),
    "floods the log": (
        source(more="while True: print('x' * 100_000)"),
        ("the import of recipe:Data did not return",),
    ),
    "takes memory": (
        source(constructor="self.held = bytearray(4 << 30)"),
        ("MemoryError", "plugin_memory_mb 512", "--plugin-memory-mb"),
    ),
    "ends its process": (source(constructor="os._exit(0)"), ("its constructor ended its process",)),
    "kills its family": (
        source(constructor="os.kill(os.getppid(), 9); time.sleep(1000)"),
        ("its constructor ended its process",),
    ),
    "exits": (source(more="sys.exit(3)"), ("'recipe:Data' cannot be imported: SystemExit: 3",)),
    "raises": (source(constructor="raise OSError('no disk')"), ("cannot be made with", "OSError: no disk")),
}


def rows(table: Mapping[str, object], *quick: str) -> list[object]:
    """The rows of a table, of which ci has those that wait for a deadline."""
    return [row if row in quick else pytest.param(row, marks=pytest.mark.ci) for row in table]


@pytest.mark.parametrize("row", rows(NOT_MADE, "raises", "ends its process", "loops at its import"))
async def test_a_run_whose_plugin_cannot_be_made_is_refused_by_name_and_others_go_on(
    world: World, redis_url: str, row: str
) -> None:
    code, words = NOT_MADE[row]
    await world.create_run(name="other")
    before = redis_content(redis_url)
    creating = asyncio.ensure_future(create(world, code))
    with pytest.raises(PluginError) as refused:
        await goes_on_during(world, "other", creating)
    assert [word for word in words if word not in refused.value.message] == [], refused.value.message
    assert redis_content(redis_url).keys() == before.keys()


def workers() -> list[int]:
    """Processes of foreign plug-ins that this process started, by the table of processes."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words, stat = path.read_text().split("\0"), (path.parent / "stat").read_text()
        except OSError:
            continue
        if "astraflow_dataflow.runs.foreign.worker" in words and "astraflow_kit.family" not in words:
            guard = int(stat.rpartition(")")[2].split()[1])
            of_guard = Path(f"/proc/{guard}/stat").read_text().rpartition(")")[2].split()[1]
            found += [int(path.parent.name)] if int(of_guard) == os.getpid() else []
    return found


LEARNS = """
class Keep:
    def __init__(self, state) -> None:
        self.state = state
    def __call__(self, group):
        self.state[group.task.task_id] = group.rewards
        {keep}
        return True
class Curate(Keep):
    def propose(self, tasks):
        {propose}
        return tasks
    def observe(self, group):
        self(group)
class Select:
    def select(self, candidates, request):
        {select}
        return [group.group_id for group in candidates[-request.num_groups:]]
"""
EVERY_KIND = {"filters": '["recipe:Keep"]', "curators": '["recipe:Curate"]', "selector": "recipe:Select"}


def learns(*, train: str = "pass", **does: str) -> str:
    """A recipe.py with a plug-in of each kind, of which those named do this besides."""
    return source(train=train, more=LEARNS.format(**{"keep": "", "propose": "", "select": ""} | does))


@pytest.mark.parametrize(
    "number", [None, signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.ci)], ids=str
)
async def test_what_plugins_decide_and_learn_survives_their_process(
    world: World, redis_url: str, number: signal.Signals | None
) -> None:
    await create(world, learns(), max_staleness=9, **EVERY_KIND)
    trainer, node = await world.trainer(), await world.node()
    assert await node.work(2) == ["train-0", "train-1"]
    await world.until(lambda status: status.trajectories.ready == 4)
    if number:
        for worker in workers():
            os.kill(worker, number)
    assert len(await node.work(2)) + len(await node.work(2)) == 4
    await world.until(lambda status: status.trajectories.ready == 12)
    await world.has_account()
    learned = {f"train-{index}": b"[0.0,1.0]" for index in range(6)}
    async with Connection(redis_url, allow_volatile=True) as connection:
        for name in ("filter recipe:Keep", "curator recipe:Curate"):
            await until_equal(partial(PluginStateStore(connection).entries, "hostile", name), learned)
    items = (await answered(lambda: trainer.acquire(1))).batch.items
    assert {item.task_id for item in items} == {"train-4", "train-5"}


HANGS = "while True: pass"
# What hangs in a call, what is waited for by name, the tasks that are trained on all the same, and their account.
HUNG: dict[str, tuple[str, str, list[str], dict[str, Any]]] = {
    "data set": (
        learns(train="while index == 2: pass"),
        "dataset_failed",
        ["train-0", "train-1"],
        {"ready": 4},
    ),
    "data set ends its process": (
        learns(train="os._exit(0) if index == 2 else None"),
        "dataset_failed",
        ["train-0", "train-1"],
        {"ready": 4},
    ),
    "filter": (
        learns(keep="while group.task.task_id == 'train-0': pass"),
        "filter_failed",
        ["train-0", "train-1"],
        {"ready": 2, "dropped": {"filter_failed": 2}},
    ),
    "curator": (learns(propose=HANGS), "curator_failed", ["train-0", "train-1"], {"ready": 4}),
    "selector": (learns(select=HANGS), "selector_failed", ["train-0", "train-1"], {"ready": 0}),
}


@pytest.mark.parametrize("row", rows(HUNG))
async def test_a_call_that_does_not_return_is_named_costs_what_it_was_asked_and_no_other_run(
    world: World, row: str
) -> None:
    code, reason, tasks, account = HUNG[row]
    await world.create_run(name="other")
    await create(world, code, **EVERY_KIND)
    trainer, node = await world.trainer(), await world.node()

    async def live() -> None:
        leased: list[str] = []
        while len(leased) < len(tasks):
            leased += await node.work(len(tasks) - len(leased))
        assert leased == tasks
        if row == "selector":
            assert len((await answered(lambda: trainer.acquire(1, wait_s=30))).batch.items) == 4
        await until(is_named)

    async def is_named() -> bool:
        await node.renew()  # without a node that would be the reason
        return reason in await world.waits()

    await goes_on_during(world, "other", asyncio.ensure_future(live()))
    assert "recipe:" in (await world.waits())[reason].detail
    await world.until(lambda status: not status.trajectories.assembling)
    await world.has_account(**account)


async def test_a_server_serves_a_run_whose_plugins_hang_when_it_starts_and_says_so(
    redis_url: str, tmp_path: Path
) -> None:
    marker = tmp_path / "hangs"
    code = source(constructor=f"time.sleep(1000 if os.path.exists({str(marker)!r}) else 0)")
    settings = {"allow_recipe_code": True, **LIMITS}
    async with served(redis_url, tmp_path, **settings) as world:
        await create(world, code)
        await world.trainer()
    marker.touch()
    async with served(redis_url, tmp_path, **settings) as world:
        world.run_id = "hostile"
        await world.until(lambda status: "plugin_hung" in {wait.reason for wait in status.waits})
        wait = (await world.waits())["plugin_hung"]
        assert "dataset recipe:Data: its constructor has not returned for" in wait.detail
        assert wait.HasField("since_time")
        node = await world.node()
        assert await node.lease(1, wait_s=0.1) == []
        marker.unlink()
        await world.until(lambda status: "plugin_hung" not in {wait.reason for wait in status.waits})
        leased: list[str] = []
        while len(leased) < 2:
            leased += await node.work()
        assert leased == ["train-0", "train-1"]
        await world.until(lambda status: status.trajectories.ready == 4)


async def has_workers(wanted: bool) -> bool:
    """Whether there are processes of foreign plug-ins, or none."""
    return bool(workers()) is wanted


CALLS, ROUNDS, PERIOD_S = 300, 3, 0.005
FLOOR_S = 0.02
"""What a call may take on a machine that others share, whatever it takes an idle server there."""


async def timed(world: World) -> list[float]:
    """How long the server takes to say what is with the other run, again and again."""
    took_s = list[float]()
    for _ in range(CALLS):
        began_s = time.perf_counter()
        await world.ask(admin.StatusResponse, run_id="other")
        took_s.append(time.perf_counter() - began_s)
        await asyncio.sleep(PERIOD_S)
    return took_s


async def hung_import(world: World, name: str) -> None:
    """One run after the other is asked for whose code does not return."""
    while True:
        with suppress(PluginError):
            await create(world, source(more=HANGS), name=name)


async def hung_filter(world: World, name: str) -> None:
    """Groups arrive for a filter that does not return from any."""
    await create(world, learns(keep=HANGS), name=name, **EVERY_KIND)
    await world.trainer()
    node = await world.node(name)
    while True:
        await node.work(1)


async def greedy_curator(world: World, name: str) -> None:
    """A curator fills its memory in each call, until it may have no more."""
    fills = "self.held = [bytearray(b'x' * 2**20) for _ in range(4096)]"
    await create(world, learns(propose=fills), name=name, **EVERY_KIND)
    await world.trainer()
    node = await world.node(name)
    while True:
        await node.lease(1, wait_s=0.5)
        await asyncio.sleep(0.2)


ATTACKS: Mapping[str, Callable[[World, str], Awaitable[None]]] = {
    "hung-import": hung_import,
    "hung-filter": hung_filter,
    "greedy-curator": greedy_curator,
}


def p99(times_s: list[float]) -> float:
    """The 99th percentile."""
    return statistics.quantiles(times_s, n=100, method="inclusive")[98]


@pytest.mark.soak
@pytest.mark.timeout(300)
async def test_other_runs_are_answered_as_fast_as_beside_an_idle_server(world: World) -> None:
    """In turns, and by the median turn: what else the machine does meets all of them alike."""
    await world.create_run(name="other")
    took_s: dict[str, list[list[float]]] = {kind: [] for kind in ("idle", *ATTACKS)}
    for turn in range(ROUNDS):
        took_s["idle"].append(await timed(world))
        for kind, attack in ATTACKS.items():
            name = f"{kind}-{turn}"
            attacking = asyncio.ensure_future(attack(world, name))
            await until(partial(has_workers, True))
            await asyncio.sleep(1)
            took_s[kind].append(await timed(world))
            assert not attacking.done(), attacking
            attacking.cancel()
            await asyncio.gather(attacking, return_exceptions=True)
            with suppress(NotFoundError):
                await world.ask(runs.DeleteRunResponse, run_id=name, force=True)
            await until(partial(has_workers, False))
    p99_s = {kind: statistics.median(map(p99, turns)) for kind, turns in took_s.items()}
    bound_s = 2 * max(p99_s["idle"], FLOOR_S)
    assert {kind: seconds for kind, seconds in p99_s.items() if seconds > bound_s} == {}, p99_s
