"""What the data plane costs in Redis commands, which a busy machine does not change: flat, however much there is."""

import asyncio
import math
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest

from astraflow.client import AsyncClient
from astraflow.dataflow.v1.batch_service_pb2 import BATCH_STAGE_TRAINED
from astraflow.rollout.v1.task_pb2 import Lease
from astraflow_dataflow.records import Recount
from astraflow_dataflow.run_loop import IDLE_S, SWEEP_S, RunLoop
from astraflow_dataflow.server import Dataflow
from astraflow_dataflow.settings import DataflowServerSettings
from astraflow_dataflow.store.keys import Keys
from astraflow_dataflow.store.replies import Reply, as_list, as_text
from astraflow_dataflow.store.writing import Argument
from astraflow_kit.serve import GrpcServer
from support.dataflow_world import World, make_episode, name_of

BY_THEMSELVES = {"info", "xread", "ping", "hello", "client", "select", "auth"}
"""Commands of connections and of whoever waits for events, which come when they come."""


@pytest.fixture
async def by_hand(redis_url: str, tmp_path: Path) -> AsyncIterator[World]:
    """A server in which nothing happens unless the test does it: nobody conducts runs or watches Redis."""
    async with served_by_hand(redis_url, tmp_path) as world:
        yield world


@asynccontextmanager
async def served_by_hand(url: str, folder: Path) -> AsyncIterator[World]:
    settings = DataflowServerSettings(redis=url, work_dir=folder)
    dataflow = Dataflow.assemble(settings)
    dataflow.registry.on_loaded = lambda _: None
    server = GrpcServer(
        dataflow.registrations(),
        settings=settings,
        metrics=dataflow.metrics,
        session_keys=dataflow.registry,
    )
    await dataflow.connection.open()
    await server.start()
    try:
        async with AsyncClient(server.address) as client:
            yield World(dataflow=dataflow, client=client, address=server.address)
    finally:
        await server.stop(deadline_s=0.2)
        await dataflow.registry.close()
        await dataflow.connection.close()


async def commands(world: World, work: Callable[[], Awaitable[object]]) -> Counter[str]:
    """The Redis commands that this takes, those inside functions too."""
    before = await _commands_done(world)
    await work()
    return await _commands_done(world) - before


async def _commands_done(world: World) -> Counter[str]:
    info = as_text(await world.dataflow.connection.raw("INFO", "commandstats"))
    calls = (
        line.removeprefix("cmdstat_").split(":calls=") for line in info.splitlines() if ":calls=" in line
    )
    done = Counter({name: int(rest.partition(",")[0]) for name, rest in calls})
    return Counter({name: n for name, n in done.items() if name.partition("|")[0] not in BY_THEMSELVES})


async def reads(world: World) -> int:
    """How often Redis has read from a connection so far: commands that are sent together are read together."""
    stats = as_text(await world.dataflow.connection.raw("INFO", "stats"))
    return int(stats.partition("total_reads_processed:")[2].split()[0])


async def conductor(world: World) -> RunLoop:
    return world.dataflow.run_loop(await world.dataflow.registry.get("run"))


async def test_a_look_costs_the_same_however_many_evaluations_there_were(by_hand: World) -> None:
    await by_hand.started(evaluation="{every_versions: 1, num_samples: 2, final_samples: 2}")
    evaluations, loop = by_hand.dataflow.store.evaluations, await conductor(by_hand)

    async def evaluated(number: int) -> None:
        what = {"versions": {"solver": 0}, "planned": 1, "samples_per_task": 1, "final": False}
        assert await evaluations.plan("run", f"{number}:periodic", **what)  # type: ignore[arg-type]
        await evaluations.give_up("run", f"{number}:periodic", reason="test")

    await evaluated(0)
    await loop.tick()
    after_one = await commands(by_hand, loop.tick)
    for number in range(1, 60):
        await evaluated(number)
    assert await commands(by_hand, loop.tick) == after_one
    assert len(await evaluations.all("run")) == 60


async def test_all_nodes_are_read_in_a_few_round_trips(by_hand: World) -> None:
    await by_hand.started()
    for number in range(300):
        await by_hand.join(f"n{number}", max_concurrent_tasks=1)
    before = await reads(by_hand)
    nodes = await by_hand.dataflow.store.nodes.all("run", now_ms=0)
    assert [node.node_id for node in nodes] == sorted(f"n{number}" for number in range(300))
    assert await reads(by_hand) - before < 30


async def test_what_a_node_says_is_one_write_however_much_it_is(by_hand: World) -> None:
    await by_hand.started()
    await by_hand.join("n1", max_concurrent_tasks=1)

    async def report(**fields: str) -> None:
        assert not await by_hand.nodes["n1"].report(connected_ms=1000, fields=fields)

    little = await commands(by_hand, report)
    much = await commands(by_hand, partial(report, **{f"field{n}": "x" for n in range(12)}))
    assert much == little
    assert little["hset"] == 1


async def test_a_server_has_more_runs_than_a_pool_of_redis_py_has_connections(by_hand: World) -> None:
    connection = by_hand.dataflow.connection
    waiting = [
        asyncio.create_task(connection.read_stream(f"s{n}", after="0", block_ms=60_000, limit=1))
        for n in range(150)
    ]
    try:
        answers = await asyncio.gather(*(connection.now_ms() for _ in range(300)))
        assert all(answers)
        await connection.raw("XADD", "s149", "*", "topic", "news")
        assert [fields for _, fields in await waiting[149]] == [{"topic": "news"}]
        assert not any(task.done() for task in waiting[:149])
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


def inner(done: Counter[str]) -> int:
    """Commands inside functions, and what calls these."""
    return sum(done.values())


async def test_all_leases_that_expired_are_given_back_in_one_look_and_leased_again_in_one_call(
    by_hand: World,
) -> None:
    _, node = await by_hand.started(*(f"t{n}" for n in range(300)), groups_per_step=300)
    held = await node.lease(256) + await node.lease(44)
    await expire_all(by_hand)
    await (await conductor(by_hand)).tick()
    assert len(held) == 300
    other = await by_hand.node("n2")
    again = await other.lease(256) + await other.lease(256)
    assert sorted(lease.task.task_id for lease in again) == sorted(lease.task.task_id for lease in held)
    assert {lease.attempt for lease in again} == {2}


async def test_a_run_that_finishes_closes_all_that_is_leased_in_one_look(by_hand: World) -> None:
    _, node = await by_hand.started(*(f"t{n}" for n in range(300)), groups_per_step=300)
    held = await node.lease(256) + await node.lease(44)
    await by_hand.finish()
    closed = await commands(by_hand, (await conductor(by_hand)).tick)
    assert await node.renew(*(lease.lease_id for lease in held)) == [lease.lease_id for lease in held]
    assert await by_hand.dataflow.connection.raw("ZCARD", "af:{run}:open") == 0
    # Each part reads no more than it closes: 300 tasks of about 30 commands.
    assert inner(closed) / 300 < 40, closed


async def test_a_node_that_comes_back_gives_back_what_it_held_a_part_in_each_call(by_hand: World) -> None:
    _, node = await by_hand.started(*(f"t{n}" for n in range(300)), groups_per_step=300)
    held = await node.lease(256) + await node.lease(44)
    again = await commands(by_hand, by_hand.node)
    # Four calls of 64 and one of 44; what a call takes is what it takes however many leases there are.
    assert again["fcall"] == 5, again
    node = by_hand.nodes["n1"]
    leased = await node.lease(256) + await node.lease(256)
    assert sorted(lease.task.task_id for lease in leased) == sorted(lease.task.task_id for lease in held)
    assert {lease.attempt for lease in leased} == {2}
    # Joining again as the same process takes nothing away.
    await by_hand.join("n1", incarnation=2, max_concurrent_tasks=64)
    assert await node.renew(*(lease.lease_id for lease in leased)) == []


async def test_a_join_that_a_server_died_in_goes_on_when_it_is_repeated(by_hand: World) -> None:
    _, node = await by_hand.started(*(f"t{n}" for n in range(100)), groups_per_step=300)
    held = await node.lease(100)
    who = ("n1", 0, node.session.number, node.session.lineage, "")
    facts = ("", "", 64, "", "", "")
    reply = await by_hand.dataflow.connection.call(Keys("run"), "join", *who, *facts)
    assert as_list(reply)[2:] == [64, b"1"]
    again = await by_hand.node()
    assert len(await again.lease(100)) == len(held)


async def test_a_poisonous_nodes_leases_go_to_others_a_part_in_each_call_and_cost_no_attempt(
    by_hand: World,
) -> None:
    _, node = await by_hand.started(
        *(f"t{n}" for n in range(200)), groups_per_step=300, max_poison=1, max_attempts=1
    )
    held = await node.lease(200)
    for number in range(2):
        episode = node.episode(held[number], 0)
        episode.trajectories[0].header.reward = math.nan
        assert await node.outcome(episode) == "POISON"
    connection = by_hand.dataflow.connection
    assert await connection.raw("ZCARD", "af:{run}:leases") == 200 - 64
    await (await conductor(by_hand)).tick()
    other = await by_hand.node("n2")
    again = [lease for _ in range(2) for lease in await other.lease(256)]
    assert sorted(lease.task.task_id for lease in again) == sorted(lease.task.task_id for lease in held)
    assert {lease.attempt for lease in again} == {2}


async def test_a_lease_takes_four_commands_whether_it_is_the_first_or_not(by_hand: World) -> None:
    _, node = await by_hand.started(*(f"t{n}" for n in range(128)), groups_per_step=300)
    first = await commands(by_hand, lambda: node.lease(128))
    assert inner(first) / 128 < 4.5, first
    await expire_all(by_hand)
    given_back = await commands(by_hand, (await conductor(by_hand)).tick)
    assert inner(given_back) / 128 < 4.5, given_back
    again = await commands(by_hand, lambda: node.lease(128))
    assert inner(again) / 128 < 4.5, again


async def test_a_node_that_loses_many_leases_at_once_hears_of_all_in_a_few_events(by_hand: World) -> None:
    _, node = await by_hand.started(*(f"t{n}" for n in range(128)), groups_per_step=300)
    held = await node.lease(128)
    await expire_all(by_hand)
    context = await by_hand.dataflow.registry.get("run")
    told: list[str] = []
    with context.wakeups.subscribe("node n1") as news:
        await news.wait(0.2)  # what came before
        given_back = await commands(by_hand, (await conductor(by_hand)).tick)
        while len(told) < 128:
            for event in await news.wait(20.0):
                assert event.fields["reason"] == "lease_lost"
                told += event.fields["leases"].split("\n")
    assert sorted(told) == sorted(map(name_of, held))
    assert given_back["xadd"] < 16


async def test_all_tasks_that_a_server_left_complete_are_settled_in_one_look(by_hand: World) -> None:
    _, node = await by_hand.started(*(f"t{n}" for n in range(100)), groups_per_step=300)
    episodes = [node.episode(lease, m) for lease in await node.lease(100) for m in lease.members]
    for first in range(0, 200, 50):
        await by_hand.dataflow.store.episodes.commit("run", episodes[first : first + 50], horizon_s=60.0)
    context = await by_hand.dataflow.registry.get("run")
    assert await by_hand.dataflow.settling.settle_left_behind(context, least_age_s=0.0) == 100
    assert await by_hand.dataflow.settling.settle_left_behind(context, least_age_s=0.0) == 0
    await by_hand.has_account(ready=200)


async def test_a_status_counts_a_few_groups_itself_and_of_many_says_what_the_counters_say(
    by_hand: World,
) -> None:
    _, node = await by_hand.started(*(f"t{n}" for n in range(40)), groups_per_step=100)
    await node.complete_all(await node.lease(20))
    audits = by_hand.dataflow.store.audits
    few = await commands(by_hand, lambda: audits.audit("run", most=1))
    await node.complete_all(await node.lease(20))
    assert await commands(by_hand, lambda: audits.audit("run", most=1)) == few
    counted, said = await audits.audit("run"), await audits.audit("run", most=10)
    assert (counted.is_whole, said.is_whole) == (True, False)
    assert (counted.held_ready, said.held_ready) == (80, 80)


@pytest.mark.parametrize("most", [1, 7, 39, 1000])
async def test_a_recount_in_slices_finds_what_a_counter_lost(by_hand: World, most: int) -> None:
    _, node = await by_hand.started(*(f"t{n}" for n in range(60)), groups_per_step=100)
    leases = await node.lease(40)
    await node.complete_all(leases[:30])
    await node.push(node.episode(leases[30], 0))
    audits = by_hand.dataflow.store.audits
    assert await audits.recount("run", most=most) == Recount(
        drift={"assembling": 0, "ready": 0, "in_batch": 0}, credit={"solver": 0}
    )
    await by_hand.dataflow.connection.raw("HINCRBY", "af:{run}:counters", "ready", 3)
    await by_hand.dataflow.connection.raw("SADD", "af:{run}:outstanding:solver", "lost t99")
    assert await audits.recount("run", most=most) == Recount(
        drift={"assembling": 0, "ready": 3, "in_batch": 0}, credit={"solver": 1}
    )


async def test_a_recount_begins_again_when_something_moved_and_gives_up_when_it_always_does(
    by_hand: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, node = await by_hand.started(*(f"t{n}" for n in range(60)), groups_per_step=100)
    leases = await node.lease(30)
    store, connection = by_hand.dataflow.store, by_hand.dataflow.connection
    call, moved = connection.call, list[Lease]()

    async def moving(keys: Keys, name: str, *arguments: Argument) -> Reply:
        reply = await call(keys, name, *arguments)
        if name == "recount" and len(moved) < most_moves:
            moved.append(lease := leases.pop())
            await store.episodes.commit(
                "run", [node.episode(lease, m) for m in lease.members], horizon_s=60.0
            )
        return reply

    monkeypatch.setattr(connection, "call", moving)
    most_moves = 2
    found = await store.audits.recount("run", most=10)
    assert found is not None
    assert set(found.drift.values()) == {0}
    assert len(moved) == 2
    most_moves = 1000
    assert await store.audits.recount("run", most=10) is None


async def test_what_a_durable_step_frees_takes_a_command_a_trajectory(by_hand: World) -> None:
    trainer, node = await by_hand.started(*(f"t{n}" for n in range(16)), groups_per_step=16, group_size=8)
    await node.complete_all(await node.lease(16))
    await trainer.train(1, base_version=0)

    async def freed() -> None:
        assert await trainer.mark_durable(1) == 128

    spent = await commands(by_hand, freed)
    assert inner(spent) / 128 < 1.5, spent
    connection = by_hand.dataflow.connection
    assert not await connection.raw("KEYS", "af:{run}:payload:*")
    assert await connection.raw("HLEN", "af:{run}:owners") == 0


async def expire_all(world: World) -> None:
    """All leases are past their deadline, as after a long silence of their node."""
    connection = world.dataflow.connection
    held = as_list(await connection.raw("ZRANGE", "af:{run}:leases", 0, -1))
    await connection.raw("ZADD", "af:{run}:leases", *(word for task in held for word in (0, as_text(task))))


async def test_an_idle_run_is_left_alone_until_something_begins_in_it(by_hand: World) -> None:
    trainer, node = await by_hand.started(dataset="Unevaluated", groups_per_step=1)
    loop = await conductor(by_hand)
    while await loop.tick() != IDLE_S:  # evaluations are planned and found empty
        pass
    leases = await node.lease(2)
    assert await loop.tick() == SWEEP_S, "leases expire"
    await node.complete(leases[0])
    assert await loop.tick() == SWEEP_S
    await node.complete(leases[1])
    assert await loop.tick() == IDLE_S
    batch = (await trainer.acquire(1)).batch
    assert 0 < await loop.tick() <= by_hand.dataflow.settings.batch_lease_s, "the alarm is due then"
    await trainer.ack(batch, BATCH_STAGE_TRAINED)
    assert await loop.tick() == IDLE_S


async def test_a_look_at_an_idle_run_takes_forty_commands_and_there_are_two_a_minute(by_hand: World) -> None:
    await by_hand.started(dataset="Unevaluated")
    loop = await conductor(by_hand)
    while await loop.tick() != IDLE_S:
        pass
    look = await commands(by_hand, loop.tick)
    assert inner(look) / IDLE_S < 1.5, look


BEGINNINGS = ["lease", "submit and lease", "episode without a lease", "bind", "release", "durable"]


@pytest.mark.parametrize("what", BEGINNINGS)
async def test_what_begins_in_an_idle_run_wakes_who_sweeps_it(by_hand: World, what: str) -> None:
    """Of everything after which an idle run is one that must be looked at."""
    trainer, node = await by_hand.started("t1", "t2", groups_per_step=1)
    if what in ("bind", "release", "durable"):
        await node.complete_all(await node.lease(1))
    if what == "durable":
        await trainer.train(1, base_version=0)
    begin: dict[str, Callable[[], Awaitable[object]]] = {
        "lease": node.lease,
        "submit and lease": partial(node.lease, 2),
        "episode without a lease": lambda: node.push(make_episode(run_id="run", task_id="t2", member=0)),
        "bind": partial(trainer.acquire, 1),
        "release": trainer.release,
        "durable": partial(trainer.mark_durable, 1),
    }
    context = await by_hand.dataflow.registry.get("run")
    with context.wakeups.subscribe("due") as news:
        await news.wait(0.2)  # what came before
        await begin[what]()
        assert await news.wait(20.0), "nobody was woken"


@pytest.mark.parametrize(("at_once", "most"), [(1, 21), (8, 7), (64, 5)])
async def test_a_trajectory_takes_few_commands_from_its_push_until_its_group_is_settled(
    by_hand: World, at_once: int, most: int
) -> None:
    await by_hand.create_run(groups_per_step=100, group_size=8)
    await by_hand.submit(*(f"t{n}" for n in range(16)))
    await by_hand.trainer()
    node, store = await by_hand.node(), by_hand.dataflow.store
    episodes = [node.episode(lease, member) for lease in await node.lease(16) for member in lease.members]
    context = await by_hand.dataflow.registry.get("run")

    async def pushed() -> None:
        for first in range(0, 128, at_once):
            await store.episodes.commit("run", episodes[first : first + at_once], horizon_s=60.0)
        assert await by_hand.dataflow.settling.settle_left_behind(context, least_age_s=0.0) == 16

    spent = await commands(by_hand, pushed)
    assert inner(spent) / 128 < most, (inner(spent) / 128, spent)
