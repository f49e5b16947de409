"""Runs, nodes and evaluations in Redis.

Each method but `RunStore.create` is one function call of the library and therefore atomic; repeated calls with equal
arguments change nothing. Called by the run registry, the membership and evaluation services, and the run loop.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from google.protobuf.json_format import ParseDict

from astraflow.dataflow.v1 import run_pb2
from astraflow.dataflow.v1.admin_service_pb2 import NodeStatus
from astraflow.dataflow.v1.run_service_pb2 import JoinRunRequest
from astraflow.errors import NotFoundError
from astraflow.rollout.v1.task_pb2 import Task
from astraflow_dataflow.records import (
    Life,
    StoredEvaluation,
    timestamp,
)
from astraflow_dataflow.rules.window import Admission
from astraflow_dataflow.store.homes.redis import Redis
from astraflow_dataflow.store.keys import RUNS_KEY, Keys
from astraflow_dataflow.store.replies import (
    Reply,
    as_bytes,
    as_int,
    as_list,
    as_mapping,
    as_text,
    as_texts,
    flag,
)
from astraflow_dataflow.store.tasks import flat
from astraflow_dataflow.store.writing import Argument
from astraflow_kit import failpoints
from astraflow_kit.identity import sealing
from astraflow_kit.identity.sealing import Session

if TYPE_CHECKING:
    from google.protobuf.timestamp_pb2 import Timestamp

RUN_STATES = {
    Life.ACTIVE: run_pb2.RUN_STATE_ACTIVE,
    Life.FINISHING: run_pb2.RUN_STATE_FINISHING,
    Life.FINISHED: run_pb2.RUN_STATE_FINISHED,
}
_NODES_AT_ONCE = 128
_NOTHING = b"[]"
_EVALUATIONS_AT_ONCE = 64
GONE = ("", "deleting")
"""States of a run that is not there, or not for long."""


class RunStore:
    """Runs: created once, moved forward in their life."""

    def __init__(self, connection: Redis) -> None:
        self._connection = connection

    async def create(
        self,
        run: run_pb2.Run,
        *,
        admission: Admission,
        archive: str = "",
    ) -> run_pb2.Run:
        """Create the run, or return the one of its name that is there, which may be another.

        It is listed before it is there, so that one that was cut off is found by a sweep, and once more after it, in
        case a sweep took it off meanwhile. `archive` is the share of its tasks that are archived, the most bytes that
        may wait for it, and the reasons; empty where nothing is.
        """
        code = run.code.SerializeToString(deterministic=True)
        limits: list[Argument] = []
        for window in admission.windows:
            limits += [
                window.policy_id,
                flag(window.frozen),
                flag(window.external),
                window.groups,
                window.min_acceptance,
                window.smoothing,
            ]
            limits += [window.max_staleness, window.groups_per_step, window.steps]
            limits += [window.replay, window.barrier]
        identity = secrets.token_hex(16)
        arguments: list[Argument] = [run.run_id, identity, run.recipe_yaml, run.recipe_as_written, code]
        arguments += [
            run.store_uri,
            admission.max_attempts,
            admission.max_poison,
            admission.max_leases,
            flag(admission.hedges),
            admission.admit,
            admission.alternate_every_steps,
            "\n".join(f"{role} {policy_id}" for role, policy_id in admission.roles.items()),
            archive,
        ]
        listed: tuple[Argument, ...] = ("ZADD", RUNS_KEY, "NX", await self._connection.now_ms(), run.run_id)
        await self._connection.raw(*listed)
        failpoints.hit("dataflow.run_listed")
        await self._connection.call(Keys(run.run_id), "create_run", *arguments, *limits)
        failpoints.hit("dataflow.run_created")
        await self._connection.raw(*listed)
        return await self.get(run.run_id)

    async def get(self, run_id: str) -> run_pb2.Run:
        """Return a run. Raises NotFoundError."""
        names = (
            "recipe",
            "code",
            "store",
            "state",
            "create_ms",
            "stopped_for",
            "identity",
            "switches",
            "written",
        )
        reply = as_list(await self._connection.raw("HMGET", Keys(run_id).of("run"), *names))
        if as_text(reply[3]) in GONE:
            raise _no_run(run_id)
        return run_pb2.Run(
            run_id=run_id,
            recipe_yaml=as_text(reply[0]),
            code=run_pb2.CodeBundle.FromString(as_bytes(reply[1])),
            store_uri=as_text(reply[2]),
            state=RUN_STATES[Life(as_text(reply[3]))],
            create_time=timestamp(as_int(reply[4])),
            stopped_for=as_text(reply[5]),
            identity=as_text(reply[6]),
            recipe_as_written=as_text(reply[8]),
            **(await self._switches(run_id, as_int(reply[7])) if reply[7] else {}),
        )

    async def seal_key(self, run_id: str, *, ours: str = "") -> str:
        """Return the secret key of the run's credentials and leases. A run that has none yet, or whose Redis lost it,
        gets `ours`, or a new one. Raises NotFoundError.
        """
        return as_text(await self._connection.call(Keys(run_id), "seal_key", ours or sealing.new_key()))

    async def switch_plugins(
        self, run_id: str, recipe_yaml: str, *, archive: str, changes: Sequence[str], by: str
    ) -> int:
        """Ask for the plug-ins of a recipe, from the end of the step in hand on. Returns the number of the switch.
        Raises PreconditionError when there were too many.
        """
        arguments = (recipe_yaml, archive, "\n".join(changes), by)
        return as_int(await self._connection.call(Keys(run_id), "switch_plugins", *arguments))

    async def switch(self, run_id: str) -> int:
        """Return the number of the switch of plug-ins that holds now; 0 before the first. Raises NotFoundError."""
        reply = as_list(await self._connection.raw("HMGET", Keys(run_id).of("run"), "state", "switch"))
        if as_text(reply[0]) in GONE:
            raise _no_run(run_id)
        return as_int(reply[1])

    async def switched_recipe(self, run_id: str, number: int) -> str:
        """Return the recipe of a switch."""
        key = Keys(run_id).of("switch", str(number))
        return as_text(await self._connection.raw("HGET", key, "recipe"))

    async def _switches(self, run_id: str, count: int) -> dict[str, Any]:
        """The fields of a run that tell how its plug-ins were switched."""
        keys = [Keys(run_id).of("switch", str(number + 1)) for number in range(count)]
        names = ("changes", "by", "ms", "effect_ms", "steps")
        found = await self._connection.raw_many(("HMGET", key, *names) for key in keys)
        told = [_switch(number, as_list(fields)) for number, fields in enumerate(found, start=1)]
        return {"switches": told, "switched_recipe_yaml": await self.switched_recipe(run_id, count)}

    async def ids(self, *, offset: int = 0, limit: int = 500) -> list[str]:
        """Return run ids, oldest first; one whose creation or deletion was cut off is among them until a sweep."""
        reply = await self._connection.raw("ZRANGE", RUNS_KEY, offset, offset + limit - 1)
        return as_texts(reply)

    async def stopped_for(self, run_id: str) -> str:
        """Return why the server stopped the run; empty when it did not."""
        return as_text(await self._connection.raw("HGET", Keys(run_id).of("run"), "stopped_for"))

    async def advance(self, run_id: str, life: Life, *, stopped_for: str = "") -> None:
        """Move the run forward in its life; `stopped_for` says why it ends early, and going on forgets it.

        Raises PreconditionError for a move back.
        """
        await self._connection.call(Keys(run_id), "advance", life.value, stopped_for)


class NodeStore:
    """Nodes that joined a run, and what they last said of themselves."""

    def __init__(self, connection: Redis) -> None:
        self._connection = connection

    async def join(self, run_id: str, request: JoinRunRequest, *, shown: Session | None = None) -> Session:
        """Register a node that showed a credential, or none, and return its session; leases of the process before it
        are taken back at once, a part in each call. Raises FencedError, PreconditionError for a name in use.
        """
        facts = (
            request.region,
            request.pool,
            request.max_concurrent_tasks,
            ",".join(request.engines),
            request.hardware,
            repr(request.price_per_hour) if request.HasField("price_per_hour") else "",
        )
        given, number, lineage = (
            request.incarnation,
            shown.number if shown else 0,
            shown.lineage if shown else "",
        )
        fresh, are_more = sealing.new_lineage(), True
        while are_more:
            who = (request.node_id, given, number, lineage, fresh)
            reply = as_list(await self._connection.call(Keys(run_id), "join", *who, *facts))
            given = number = as_int(reply[0])
            lineage, are_more = as_text(reply[1]), as_text(reply[3]) == "1"
        return Session(
            speaker=sealing.NODE, run_id=run_id, name=request.node_id, number=number, lineage=lineage
        )

    async def note_refused(self, session: Session, reasons: Mapping[str, int]) -> None:
        """Count episodes that a node pushed and that were not its own to push, by the reason."""
        flat = [part for item in reasons.items() for part in item]
        await self._connection.call(Keys(session.run_id), "note_refused", session.name, *flat)

    async def has_ended(self, session: Session) -> bool:
        """Return whether the node's name has a newer session, or another one under its number."""
        stored = await self._connection.raw(
            "HGET", Keys(session.run_id).of("node", session.name), "incarnation"
        )
        number, _, lineage = as_text(stored).partition(" ")
        return int(number or 0) > session.number or (
            int(number or 0) == session.number and lineage != session.lineage
        )

    async def report(
        self,
        session: Session,
        *,
        connected_ms: int,
        heard: bool = True,
        fields: Mapping[str, str | int] | None = None,
    ) -> str:
        """Note a sign of life: of the node itself, or (not `heard`) only of its stream.

        Returns why the node must leave, empty when it need not.

        Raises FencedError for a session that another one ended, UnavailableError where Redis lost that it joined.
        """
        pairs: list[Argument] = [part for item in (fields or {}).items() for part in item]
        reply = await self._connection.call(
            Keys(session.run_id),
            "report",
            session.name,
            f"{session.number} {session.lineage}",
            connected_ms,
            flag(heard),
            *pairs,
        )
        state, drain = as_texts(reply)
        return "run_finished" if Life(state) is Life.FINISHED else drain

    async def reconcile(
        self, run_id: str, *, node_id: str, held: Sequence[str], ttl_s: float
    ) -> tuple[list[str], int]:
        """Renew what a node holds and give back what it was given and does not hold.

        Returns (leases that are not its own any more, leases given back).
        """
        lost, given = as_list(
            await self._connection.call(Keys(run_id), "reconcile", node_id, int(ttl_s * 1000), *held)
        )
        return as_texts(lost), as_int(given)

    async def leave(self, run_id: str, *, node_id: str, session: str, undelivered: Sequence[str]) -> int:
        """End a working session and give back leases that it never confirmed. Returns how many."""
        return as_int(await self._connection.call(Keys(run_id), "leave", node_id, session, *undelivered))

    async def drain(self, run_id: str, *, node_id: str, reason: str) -> tuple[int, bool]:
        """Order a node to leave. Returns (leases it holds, whether it is connected). Raises NotFoundError."""
        leases, connected = as_list(await self._connection.call(Keys(run_id), "drain", node_id, reason))
        return as_int(leases), as_text(connected) == "1"

    async def undrain(self, run_id: str, *, node_id: str) -> str:
        """Let a node have leases again. Returns why it was drained; empty when it was not. Raises NotFoundError."""
        return as_text(await self._connection.call(Keys(run_id), "undrain", node_id))

    async def max_tasks(self, run_id: str, node_id: str) -> int:
        """Return the bound of leases the node joined with; 0 when unknown."""
        return as_int(await self._connection.raw("HGET", Keys(run_id).of("node", node_id), "max_tasks"))

    async def all(self, run_id: str, *, now_ms: int) -> list[NodeStatus]:
        """Return the nodes by id; connected is who has called recently at `now_ms`."""
        keys = Keys(run_id)
        ids = sorted(as_texts(await self._connection.raw("SMEMBERS", keys.of("nodes"))))
        nodes = []
        for first in range(0, len(ids), _NODES_AT_ONCE):
            some = ids[first : first + _NODES_AT_ONCE]
            found = as_list(await self._connection.call(keys, "nodes", *some))
            for node_id, (leases, fields) in zip(some, map(as_list, found), strict=True):
                nodes.append(_node(node_id, as_list(fields), leases=as_int(leases), now_ms=now_ms))
        return nodes


class EvaluationStore:
    """Planned evaluations, their lanes and their sums."""

    def __init__(self, connection: Redis) -> None:
        self._connection = connection

    async def plan(
        self,
        run_id: str,
        evaluation_id: str,
        *,
        versions: Mapping[str, int],
        planned: int,
        samples_per_task: int,
        final: bool,
    ) -> bool:
        """Plan a pass once. Returns whether it is new: not beside an open one, nor at older versions."""
        pairs: list[Argument] = [part for item in versions.items() for part in item]
        arguments: list[Argument] = [evaluation_id, planned, samples_per_task, flag(final), *pairs]
        return as_int(await self._connection.call(Keys(run_id), "plan_evaluation", *arguments)) == 1

    async def request(
        self,
        run_id: str,
        evaluation_id: str,
        *,
        digest: str,
        versions: Mapping[str, int],
        planned: int,
        samples_per_task: int,
        tasks: Sequence[bytes],
    ) -> bool:
        """Note a request for a pass; `tasks` are its own, if any, serialized. Returns whether it is new. Raises
        ConflictError for another one under its id, PreconditionError with what to change.
        """
        arguments: list[Argument] = [evaluation_id, digest, planned, samples_per_task, len(versions)]
        arguments += [part for item in versions.items() for part in item]
        reply = await self._connection.call(Keys(run_id), "request_evaluation", *arguments, *tasks)
        return as_int(reply) == 1

    async def open_requested(self, run_id: str, evaluation_id: str, *, policies: Sequence[str]) -> bool:
        """Open a pass that waits, at the versions it names and the newest of other `policies`. Returns False beside an
        open one.
        """
        reply = await self._connection.call(Keys(run_id), "open_requested", evaluation_id, *policies)
        return as_int(reply) == 1

    async def own_tasks(self, run_id: str, evaluation_id: str, *, start: int, count: int) -> list[Task]:
        """Return tasks that came with a request, from one on."""
        key = Keys(run_id).of("evaluation_tasks", evaluation_id)
        found = as_list(await self._connection.raw("LRANGE", key, start, start + count - 1))
        return [Task.FromString(as_bytes(spec)) for spec in found]

    async def held_versions(self, run_id: str) -> dict[str, int]:
        """Return the version of each policy beyond which nodes get none: that of an open pass, else the lowest that a
        waiting one names.
        """
        waiting, opened = await self._pending(run_id)
        held: dict[str, int] = {}
        for versions in opened.values():
            for policy_id, version in versions.items():
                held[policy_id] = max(version, held.get(policy_id, version))
        if held:
            return held
        for versions in waiting.values():
            for policy_id, version in versions.items():
                held[policy_id] = min(version, held.get(policy_id, version))
        return held

    async def pinned_for(self, run_id: str, policy_id: str) -> dict[int, str]:
        """Return the versions of a policy that open and waiting passes need, each with the id of one."""
        waiting, opened = await self._pending(run_id)
        return {
            versions[policy_id]: evaluation_id
            for evaluation_id, versions in (waiting | opened).items()
            if policy_id in versions
        }

    async def _pending(self, run_id: str) -> list[dict[str, dict[str, int]]]:
        """The versions of the passes that wait, and of those that are open. They are read in the order in which a pass
        goes from one to the other, so that none is missed on its way.
        """
        found = [
            as_mapping(await self._connection.raw("HGETALL", Keys(run_id).of(f"{state}_evaluations")))
            for state in ("waiting", "open")
        ]
        return [
            {evaluation_id: _versions(text) for evaluation_id, text in passes.items()} for passes in found
        ]

    async def feed(
        self,
        run_id: str,
        evaluation_id: str,
        *,
        expected_fed: int,
        planned: int,
        tasks: Sequence[Task],
        journal: str,
    ) -> bool:
        """Add samples after the first `expected_fed`, and their tasks to the journal. Returns False when another server
        was first.
        """
        reply = await self._connection.call(
            Keys(run_id), "feed_evaluation", evaluation_id, expected_fed, planned, journal, *flat(tasks)
        )
        return as_int(reply) >= 0

    async def give_up(self, run_id: str, evaluation_id: str, *, reason: str, state: str = "given_up") -> None:
        """End an evaluation that waits or is open with what it has; `state` is the one that it ends in."""
        await self._connection.call(Keys(run_id), "give_up_evaluation", evaluation_id, reason, state)

    async def journal(self, run_id: str, evaluation_id: str) -> str:
        """Return the journal of a pass, for `rules.scores`; empty when it has none any more."""
        key = Keys(run_id).of("evaluation_journal", evaluation_id)
        return as_text(await self._connection.raw("GET", key))

    async def all(self, run_id: str) -> list[StoredEvaluation]:
        """Return the evaluations, oldest first."""
        keys = Keys(run_id)
        ids = as_texts(await self._connection.raw("ZRANGE", keys.of("evaluations"), 0, -1))
        found: list[StoredEvaluation] = []
        for first in range(0, len(ids), _EVALUATIONS_AT_ONCE):
            some = ids[first : first + _EVALUATIONS_AT_ONCE]
            stored = await self._connection.raw_many(
                ("HGETALL", keys.of("evaluation", name)) for name in some
            )
            found += map(_evaluation, some, map(as_mapping, stored))
        return found

    async def current(self, run_id: str) -> list[StoredEvaluation]:
        """Return the evaluations on which it depends what is evaluated next, oldest first: those that are open or wait,
        and the ones begun and planned last. However many there were before, their number is bounded.
        """
        found = [as_list(item) for item in as_list(await self._connection.call(Keys(run_id), "passes"))]
        found.sort(key=lambda item: (float(as_text(item[1])), as_text(item[0])))
        return [_evaluation(as_text(name), as_mapping(fields)) for name, _, fields in found]


def _switch(number: int, fields: Sequence[Reply]) -> run_pb2.PluginSwitch:
    changes, by, requested_ms, effect_ms, steps = fields
    return run_pb2.PluginSwitch(
        number=number,
        changes=as_text(changes).splitlines(),
        requested_by=as_text(by),
        request_time=timestamp(as_int(requested_ms)),
        effect_time=timestamp(as_int(effect_ms)) if effect_ms else None,
        steps=_versions(as_bytes(steps)) if steps else {},
    )


def _no_run(run_id: str) -> NotFoundError:
    return NotFoundError(f"no run {run_id!r} on this server; create it, or list the runs it has")


_Field: TypeAlias = tuple[str, Callable[[bytes], Any]]


def _time(value: bytes) -> Timestamp:
    return timestamp(int(value))


_NODE_FIELDS: Mapping[bytes, _Field] = {
    **{
        name.encode(): (name, int)
        for name in ("restarts", "episodes", "trajectories", "tokens", "engine_restarts")
    },
    **{name.encode(): (name, int) for name in ("credits", "max_episodes", "poisoned", "refused")},
    **{
        name.encode(): (name, bytes.decode)
        for name in (
            "waiting_for",
            "waiting_detail",
            "region",
            "pool",
            "hardware",
            "bounded_by",
            "environment_fault",
            "refused_for",
        )
    },
    b"incarnation": ("incarnation", lambda value: int(value.split()[0])),
    b"max_tasks": ("max_concurrent_tasks", int),
    b"drain": ("drain_reason", bytes.decode),
    b"price": ("price_per_hour", float),
    b"engines": ("engines", lambda value: value.decode().split(",")),
    b"serving": ("serving_versions", json.loads),
    b"seen_ms": ("last_seen_time", _time),
    b"join_ms": ("join_time", _time),
    b"refused_ms": ("refused_time", _time),
    b"environment_fault_ms": ("environment_fault_time", _time),
    b"task_ms": ("task_duration", lambda value: timedelta(milliseconds=int(float(value)))),
    b"follow_ms": ("follow_duration", lambda value: timedelta(milliseconds=int(value))),
}
"""What is kept of a node: the field of its status, and how its bytes are read."""
_NODE_LISTS = tuple((name.encode(), name) for name in ("weight_faults", "engine_loads", "engine_faults"))


def _node(node_id: str, flat: Sequence[Reply], *, leases: int, now_ms: int) -> NodeStatus:
    """A node's status. `flat` has names and values in turn; what was never said is left out."""
    stored = cast("dict[bytes, bytes]", dict(zip(flat[::2], flat[1::2], strict=True)))
    read = {
        known[0]: known[1](value)
        for name, value in stored.items()
        if value and (known := _NODE_FIELDS.get(name))
    }
    node = NodeStatus(
        node_id=node_id, leases=leases, connected=as_int(stored.get(b"connected_until")) > now_ms, **read
    )
    told = [(field, text) for name, field in _NODE_LISTS if (text := stored.get(name)) and text != _NOTHING]
    for field, text in told:
        for item in json.loads(text):
            ParseDict(item, getattr(node, field).add())
    if told and node.connected:
        node.tokens_per_s = sum(load.tokens_per_s for load in node.engine_loads)
    return node


def _versions(text: bytes) -> dict[str, int]:
    pairs = (line.rpartition(" ") for line in text.decode().splitlines())
    return {policy_id: int(version) for policy_id, _, version in pairs}


def _evaluation(evaluation_id: str, fields: Mapping[str, bytes]) -> StoredEvaluation:
    means = {
        name.removeprefix("s "): (float(total), int(fields["n " + name.removeprefix("s ")]))
        for name, total in fields.items()
        if name.startswith("s ")
    }
    rewards = {tuple(name.split(" ")[1:]): mean for name, mean in means.items() if name.startswith("reward ")}
    return StoredEvaluation(
        evaluation_id=evaluation_id,
        versions=_versions(fields.get("versions", b"")),
        planned=as_int(fields.get("planned")),
        samples_per_task=as_int(fields.get("samples_per_task", b"1")),
        final=as_text(fields.get("final")) == "1",
        state=as_text(fields.get("state")),
        fed=as_int(fields.get("fed")),
        done=as_int(fields.get("done")),
        failed=as_int(fields.get("failed")),
        samples={name.partition(" ")[2]: int(n) for name, n in fields.items() if name.startswith("samples ")},
        rewards={(policy_id, role): mean for (policy_id, role), mean in rewards.items()},
        metrics={
            name.removeprefix("metric "): mean for name, mean in means.items() if name.startswith("metric ")
        },
        complete_ms=as_int(fields.get("complete_ms")),
        create_ms=as_int(fields.get("create_ms")),
        requested="requested" in fields,
        has_own_tasks=as_int(fields.get("own_tasks")) > 0,
        reason=as_text(fields.get("reason")),
    )
