"""What Redis keeps of the episodes of a run, to be compared with what it keeps of the same that came otherwise."""

from collections.abc import Sequence

from astraflow_dataflow.store.keys import Keys
from astraflow_dataflow.store.replies import as_int, as_list, as_mapping, as_text
from support.dataflow_world import World, until_equal

OF_TASKS = frozenset(
    {
        "copies",
        "group",
        "node_leases",
        "outstanding",
        "retry",
        "settling",
        "task",
        "trace",
        "trajectories",
        "written",
    }
)
"""Kinds of keys that no background work makes or removes."""


async def settled(world: World) -> None:
    """Wait until no complete task waits for its groups to be judged."""
    raw, settling = world.dataflow.connection.raw, Keys(world.run_id).of("settling")

    async def num_settling() -> int:
        return as_int(await raw("ZCARD", settling))

    await until_equal(num_settling, 0)


async def kept(world: World, task_ids: Sequence[str]) -> dict[str, object]:
    """What Redis keeps of episodes, without what says when they came and which run they are of."""
    raw, keys = world.dataflow.connection.raw, Keys(world.run_id)

    async def fields(name: str, *leave_out: str) -> dict[str, bytes]:
        found = as_mapping(await raw("HGETALL", name))
        return {field: value for field, value in sorted(found.items()) if field not in leave_out}

    async def task(task_id: str) -> dict[str, bytes]:
        found = await fields(keys.of("task", task_id), "entry", "leased_ms")
        # Who has the members of a task that came in one push is in one field.
        for line in filter(None, found.pop("whole", b"").split(b"\n")):
            member, episode_id, *_ = line.split(b"\t")
            found[f"m{member.decode()}"] = b"f" + episode_id
        return dict(sorted(found.items()))

    async def trace(task_id: str) -> list[str]:
        told = (await world.why(task_id)).task
        for each in (*told.leases, *told.episodes, *told.trajectories):
            for when in [name.name for name, _ in each.ListFields() if name.name.endswith("_time")]:
                each.ClearField(when)
        told.ClearField("submit_time")
        return sorted(map(str, (*told.leases, *told.episodes, *told.trajectories)))

    async def lasts(name: str) -> bool:
        return as_int(await raw("TTL", name)) == -1  # what was uploaded again for nothing ends by itself

    names = [as_text(name) for name in as_list(await raw("KEYS", keys.prefix.replace("{", "\\{") + "*"))]
    counters = await fields(keys.of("counters"), "moved")
    policy, node = await fields(keys.of("policy", "solver")), await fields(keys.of("node", "n1"))
    return {
        "tasks": {task_id: await task(task_id) for task_id in task_ids},
        "traces": {task_id: await trace(task_id) for task_id in task_ids if await task(task_id)},
        "owners": {item: place.split()[0] for item, place in (await fields(keys.of("owners"))).items()},
        "outside": sum(map(int, (await fields(keys.of("packs"))).values())),
        "groups": [await fields(keys.of("group", f"{task_id}/solver"), "score") for task_id in task_ids],
        "counters": {name: value for name, value in counters.items() if value != b"0"},
        "policy": [policy.get(name) for name in ("acceptance", "settled")],
        "node": [node.get(name) for name in ("episodes", "trajectories", "poisoned")],
        "failures": await fields(keys.of("failures")),
        "routed": await fields(keys.of("routed")),
        "archive": await fields(keys.of("archive"), "bytes"),
        "payloads": sorted([name for name in names if ":payload:" in name and await lasts(name)]),
        "names": sorted(name for name in names if name.split(":")[2] in OF_TASKS),
        "open": as_list(await raw("ZRANGE", keys.of("open"), 0, -1)),
        "ready": as_int(await raw("ZCARD", keys.of("ready", "solver"))),
        "leases": as_list(await raw("ZRANGE", keys.of("leases"), 0, -1)),
    }


async def times_to_live(world: World) -> list[int]:
    """Of all payloads and of what is written beside them, in seconds, -1 of those that stay."""
    raw = world.dataflow.connection.home("run").raw
    found = [await raw("KEYS", f"af:[{{]run}}:{kind}:*") for kind in ("payload", "written")]
    return sorted([as_int(await raw("TTL", as_text(name))) for names in found for name in as_list(names)])
