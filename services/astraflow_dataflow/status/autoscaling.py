"""Autoscaling: measures a run, window after window, and keeps the target that the state machine makes of it in Redis.

A window begins with the first step that ends when the nodes of the last decision are there, and ends after `window_s`
and `window_steps`, or when a trainer has waited too much for any window. Invariant:
the state moves by compare-and-set, so of several servers over one Redis one decides, and whoever reads the target,
KEDA, a launcher or a person, reads the same. `server` runs one per run that has `raas.autoscaling`.
"""

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from pydantic import TypeAdapter

from astraflow.dataflow.v1.admin_service_pb2 import Autoscaling, NodeStatus
from astraflow.errors import AstraflowError, NotFoundError
from astraflow.recipe.dataflow import AutoscalingSettings
from astraflow_dataflow.records import Audit, Life, PolicyState, timestamp
from astraflow_dataflow.rules.waits import STARTS
from astraflow_dataflow.runs.registry import RunContext
from astraflow_dataflow.status.pool_target import PoolTarget, PoolWindow, decide
from astraflow_dataflow.status.pools import leasable_tasks
from astraflow_dataflow.store.plugin_states import PluginStateStore, StateChange
from astraflow_dataflow.store.store import Store
from astraflow_kit.log import get_logger

log = get_logger(__name__)

_NAME, _ENTRY = "raas.autoscaling", "state"
"""Of the state among those of plug-ins, none of which is called so."""
_MOST_LOOK_S, _LEAST_LOOK_S, _LOOKS = 5.0, 0.25, 12
"""Between two looks; a window has at least so many."""
_STARVING = 0.9
"""A trainer that waits so much will take no `window_steps`, and needs none to be understood."""


@dataclass(frozen=True, kw_only=True)
class PolicyReading:
    """What one trained policy has come to so far."""

    waited_ms: int
    steps: int
    bound: int
    """Trajectories in batches."""
    staleness: float
    """Sum of theirs, each over `max_staleness`."""


@dataclass(frozen=True, kw_only=True)
class FleetReading:
    """A run at one moment."""

    now_ms: int
    nodes: int
    """At work, of the pools that are scaled."""
    busy: float
    """Share of their places that are taken; 1 while tasks wait for a place."""
    policies: Mapping[str, PolicyReading]
    """Those whose trainer works."""


@dataclass(frozen=True, kw_only=True)
class AutoscalingState:
    """The target, and the window that is measured for the next one; `first` is None until it begins."""

    target: PoolTarget
    last: FleetReading
    there: FleetReading | None = None
    """Before it begins: since when the nodes are there."""
    first: FleetReading | None = None
    node_ms: float = 0.0
    busy_ms: float = 0.0
    decided: PoolWindow | None = None
    """The window of the last decision."""


_STATES = TypeAdapter(AutoscalingState)


@dataclass(frozen=True)
class Autoscaler:
    """Measures and decides for one run."""

    context: RunContext
    store: Store
    settings: AutoscalingSettings

    async def run(self) -> None:
        """Look again and again until the run is gone or the task is cancelled."""
        pause_s = max(_LEAST_LOOK_S, min(_MOST_LOOK_S, self.settings.window_s / _LOOKS))
        while True:
            try:
                await self.look()
            except NotFoundError:
                return
            except AstraflowError as error:
                log.warning("autoscaling.postponed", reason=error.reason, message=error.message)
            await asyncio.sleep(pause_s)

    async def look(self) -> None:
        """Take one reading into the state, unless another server did meanwhile."""
        run_id, states = self.context.run_id, self.store.plugin_states
        (revision,) = await states.revisions(run_id, [_NAME])
        before = await stored(states, run_id)
        audit = await self.store.audits.audit(run_id)
        if audit.life is not Life.ACTIVE:
            return
        nodes = await self.store.nodes.all(run_id, now_ms=audit.now_ms)
        found = reading(audit, nodes, pools=self.settings.pools)
        after = (
            begun(found, settings=self.settings)
            if before is None
            else advance(before, found, settings=self.settings)
        )
        change = StateChange(name=_NAME, revision=revision, entries={_ENTRY: _STATES.dump_json(after)})
        if await states.save(run_id, [change]) and before and after.target.nodes != before.target.nodes:
            log.info("autoscaling.decided", nodes=after.target.nodes, reason=after.target.reason)


async def stored(states: PluginStateStore, run_id: str) -> AutoscalingState | None:
    """The state of a run; None before the first look."""
    entry = (await states.entries(run_id, _NAME)).get(_ENTRY)
    return _STATES.validate_json(entry) if entry else None


def begun(first: FleetReading, *, settings: AutoscalingSettings) -> AutoscalingState:
    """The state before anything is measured."""
    return AutoscalingState(
        target=PoolTarget(nodes=settings.first_nodes, changed_s=first.now_ms / 1000), last=first
    )


def reading(audit: Audit, nodes: Sequence[NodeStatus], *, pools: Mapping[str, object]) -> FleetReading:
    """What an audit and its nodes say."""
    at_work = scaled_nodes(nodes, pools=pools)
    places = sum(node.max_concurrent_tasks for node in at_work)
    taken = sum(node.leases for node in at_work)
    return FleetReading(
        now_ms=audit.now_ms,
        nodes=len(at_work),
        busy=1.0 if leasable_tasks(audit) else min(1.0, taken / places) if places else 0.0,
        policies={
            policy.policy_id: _policy_reading(policy, audit.now_ms)
            for policy in audit.policies
            if policy.heard_ms and not (policy.frozen or policy.external or policy.waits_for_turn_of)
        },
    )


def scaled_nodes(nodes: Sequence[NodeStatus], *, pools: Mapping[str, object]) -> list[NodeStatus]:
    """Those of the pools that can take tasks."""
    return [
        node
        for node in nodes
        if node.pool in pools
        and node.connected
        and not node.drain_reason
        and node.waiting_for not in (*STARTS, "plugin_start", "drain")
    ]


def _policy_reading(policy: PolicyState, now_ms: int) -> PolicyReading:
    # On-policy batches say nothing of what piles up: they count as stale as they may be.
    shares = {age: age / policy.max_staleness if policy.max_staleness else 1.0 for age in policy.staleness}
    return PolicyReading(
        waited_ms=policy.waited_until_ms(now_ms),
        steps=policy.finished_step,
        bound=sum(policy.staleness.values()),
        staleness=sum(shares[age] * count for age, count in policy.staleness.items()),
    )


def advance(
    state: AutoscalingState, found: FleetReading, *, settings: AutoscalingSettings
) -> AutoscalingState:
    """Return the state after another reading."""
    if state.first is None:
        return _before(state, found, settings=settings)
    first, passed_ms = state.first, max(0, found.now_ms - state.last.now_ms)
    state = replace(
        state,
        last=found,
        node_ms=state.node_ms + passed_ms * found.nodes,
        busy_ms=state.busy_ms + passed_ms * found.busy,
    )
    span_ms = found.now_ms - first.now_ms
    same = found.policies.keys() & first.policies.keys()
    if not same or span_ms <= 0:
        return state if same else _anew(state, state.target)
    window = _window(state, first, span_ms=span_ms, policies=sorted(same))
    steps = min(found.policies[name].steps - first.policies[name].steps for name in same)
    if not _is_over(window, span_s=span_ms / 1000, steps=steps, settings=settings):
        return state
    decided = decide(state.target, window, settings=settings, now_s=found.now_ms / 1000)
    return replace(_anew(state, decided), decided=window)


def _before(
    state: AutoscalingState, found: FleetReading, *, settings: AutoscalingSettings
) -> AutoscalingState:
    """A window begins with a step that ends: what that one waited for was left to too few nodes, or to none yet."""
    late = found.now_ms / 1000 - state.target.changed_s >= settings.start_s
    if not found.policies or not (late or found.nodes == state.target.nodes):
        return replace(state, last=found, there=None)
    there = state.there or found
    same = found.policies.keys() & there.policies.keys()
    has_ended = all(found.policies[name].steps > there.policies[name].steps for name in same)
    if has_ended or not found.nodes or found.now_ms - there.now_ms >= 1000 * settings.start_s:
        return replace(state, last=found, there=None, first=found)
    return replace(state, last=found, there=there)


def _is_over(window: PoolWindow, *, span_s: float, steps: int, settings: AutoscalingSettings) -> bool:
    """Whether a window is long enough, or a trainer has waited already what is too much for one that is."""
    if span_s >= settings.window_s and (steps >= settings.window_steps or window.wait_share >= _STARVING):
        return True
    whole_s = max(settings.window_s, span_s * settings.window_steps / steps) if steps else math.inf
    return window.wait_share * span_s > settings.grow_above_wait * whole_s


def _anew(state: AutoscalingState, target: PoolTarget) -> AutoscalingState:
    """The next window: it begins now where the nodes stay as they are, else when they are there."""
    begins = target.nodes == state.target.nodes and bool(state.last.policies)
    return replace(state, target=target, first=state.last if begins else None, node_ms=0.0, busy_ms=0.0)


def _window(
    state: AutoscalingState, first: FleetReading, *, span_ms: int, policies: Sequence[str]
) -> PoolWindow:
    pairs = [(first.policies[name], state.last.policies[name]) for name in policies]
    waits = [(now.waited_ms - then.waited_ms) / span_ms for then, now in pairs]
    stale = [
        (now.staleness - then.staleness) / (now.bound - then.bound) if now.bound > then.bound else 0.0
        for then, now in pairs
    ]
    return PoolWindow(
        nodes=state.node_ms / span_ms,
        wait_share=min(1.0, max(waits)),
        busy_share=state.busy_ms / span_ms,
        staleness_share=min(stale),
    )


def autoscaling_message(
    state: AutoscalingState | None, *, settings: AutoscalingSettings, life: Life, nodes: Sequence[NodeStatus]
) -> Autoscaling:
    """The state as the contract says it; a run that has finished wants no nodes."""
    target = state.target if state else PoolTarget(nodes=settings.first_nodes)
    wanted = 0 if life is Life.FINISHED else target.nodes
    window = state.decided if state else None
    return Autoscaling(
        target_nodes=wanted,
        nodes=sum(node.connected and node.pool in settings.pools for node in nodes),
        reason="the run has finished" if life is Life.FINISHED else target.reason,
        change_time=timestamp(int(target.changed_s * 1000)) if target.direction else None,
        grown=target.grown,
        shrunk=target.shrunk,
        turns=target.turns,
        wait_share=window.wait_share if window else 0.0,
        busy_share=window.busy_share if window else 0.0,
        staleness_share=window.staleness_share if window else 0.0,
        pools=settings.split(wanted) if wanted else dict.fromkeys(settings.pools, 0),
    )
