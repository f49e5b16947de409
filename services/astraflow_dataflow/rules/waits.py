"""Waits: what each stage of the data path waits for now, since when, and what would release it.

Pure: computed from one audit, the nodes and the evaluations. A wait is named by (stage, policy, reason).
Called by reporting, shown by Status and `why`.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter

from astraflow.dataflow.v1.admin_service_pb2 import NodeStatus
from astraflow.dataflow.v1.version_pb2 import WeightFault
from astraflow_dataflow.records import (
    Audit,
    Life,
    PolicyState,
    Refused,
    StoredEvaluation,
    TrainerReport,
)
from astraflow_dataflow.rules.failures import some_of
from astraflow_dataflow.rules.faults import PluginFault

_BATCH_RELEASES = {
    "ready_groups": "nodes finish the outstanding groups; if there are none, see what `lease` waits for",
    "publish": "the trainer announces the versions it has trained",
    "barrier": "nodes finish the groups that are still sampled, or their deadline closes them",
    "selector": "the selector takes groups; it is asked again when another one is ready",
    "batch_needs": "other groups become ready; when none are to come, or after dataflow.batch_needs.max_wait_s, the "
    "step takes those that are",
}

# What is the matter with a weight store, as trainers and nodes report it, and what ends it.
_STORE = {
    "store_missing": ("the weight store is not there", "mount it, or bring its folder back (none is made)"),
    "store_read_only": (
        "the weight store may not be written",
        "mount it read-write, or mend its owner and mode",
    ),
    "store_full": ("the weight store is full", "make room in it"),
    "store_unreachable": (
        "the weight store does not answer, or fails",
        "bring it, or the network to it, back",
    ),
}
# What ends it for a node that cannot activate a version.
_ACTIVATED = {
    "weight_fault": "the damaged object is repaired; `astraflow weights verify {version}` names it",
    **{reason: f"{remedy}; the node goes on by itself" for reason, (_, remedy) in _STORE.items()},
}

_MADE = "it returns, or the daemon ends at plugin_start_timeout_s and says where it stood; correct it"

# What only a trainer knows: the stage that shows it, what it is when the trainer says no more, and what ends it.
_REPORTED = {
    "warm_start": (
        "batch",
        "the initial model is made",
        "it ends by itself; its result is kept for the next start",
    ),
    "model_loading": (
        "batch",
        "the model is loaded",
        "it ends by itself; if it takes long, see the trainer's log",
    ),
    "plugin_hung": ("batch", "the trainer makes the recipe's plug-ins", _MADE),
    "paused": (
        "batch",
        "an operator paused the trainer",
        "an operator ends the pause (TrainerService.Resume)",
    ),
    "trainer_hung": (
        "batch",
        "the training thread stands still",
        "the trainer ends by itself after ASTRAFLOW_TRAINING_STALL_S and is started again with the same batch; "
        "the log of the trainer has the stack (training.hung)",
    ),
    "descriptors_exhausted": (
        "batch",
        "the trainer can open no more files and connections",
        "start it with a higher limit (`ulimit -n`, LimitNOFILE of systemd); if it comes again, its log and `ls -l "
        "/proc/PID/fd` say what it leaves open",
    ),
    **{
        reason: ("publish", meaning, f"{remedy}; the trainer goes on by itself")
        for reason, (meaning, remedy) in _STORE.items()
    },
}
_REPORT_LIFE_MS = 15_000
"""A trainer that waits says so every 2 s: what it said longer ago than this is not known any more."""

# Kind of a failed plug-in: the stage that shows it, and what becomes of the stage's work.
_PLUGIN_FAULTS = {
    "curator": ("lease", "tasks are leased as they were drawn"),
    "filter": ("batch", "groups it fails on are dropped as filter_failed"),
    "selector": ("batch", "batches take the groups whose deadline is nearest"),
}
_FRESH_MS = 30_000
"""A node that meets an environment's service again within this time shows it, or does not ask it any more."""
_MANY_SKIPPED = 1024
_MANY_UNUSED = 0.02


@dataclass(frozen=True, kw_only=True)
class Wait:
    """One stage that waits; `since_ms` is set where Redis knows it, else the book does."""

    stage: str
    reason: str
    detail: str
    released_by: str
    policy_id: str = ""
    since_ms: int | None = None
    progress: float | None = None
    """How far a long phase has come, in [0, 1]."""


def current_waits(
    audit: Audit,
    nodes: Sequence[NodeStatus],
    evaluations: Sequence[StoredEvaluation],
    *,
    faults: Sequence[PluginFault] = (),
    skipped: int = 0,
    refused: Refused | None = None,
    trainer_lease_s: float = math.inf,
    clock_jumped_ms: int = 0,
    trains: bool = True,
) -> list[Wait]:
    """Return what waits now; empty when all flows. A trainer that has not called for its lease is silent, counted from
    the last jump of Redis' clock at the earliest. A run that does not train waits for no batch, and leases nothing for
    training.
    """
    if audit.life is Life.FINISHED:
        return []
    connected = [node for node in nodes if node.connected]
    waits = [*_evaluation_waits(evaluations, connected)]
    if refused is not None and refused.count:
        waits.append(_refused(refused, connected))
    if audit.life is Life.ACTIVE:
        waits += _lease_waits(audit, connected, faults, skipped, trains=trains)
        waits += _starting_nodes(connected)
    waits += _makers(connected)
    waits += _plugin_faults(faults)
    waits += _weight_faults(connected)
    waits += _engine_faults(connected)
    waits += _poisonous(nodes)
    waits += _not_leased(nodes, now_ms=audit.now_ms)
    waits += _environment_faults(connected, now_ms=audit.now_ms)
    for policy in audit.policies:
        if audit.life is Life.ACTIVE:
            waits += _node_waits(policy, connected)
        waits += _reported_waits(policy, now_ms=audit.now_ms)
        if not policy.frozen and (trains or policy.doubt):
            heard_ms = _heard_ms(policy, now_ms=audit.now_ms, jumped_ms=clock_jumped_ms)
            waits += _batch_waits(
                policy, now_ms=audit.now_ms, heard_ms=heard_ms, lease_ms=1000 * trainer_lease_s
            )
            waits += _publish_waits(policy)
    return waits


def _weight_faults(connected: Sequence[NodeStatus]) -> Iterator[Wait]:
    """One wait per policy that a node cannot bring up to date, and reason."""
    found: dict[tuple[str, str], list[tuple[str, WeightFault]]] = {}
    for node in connected:
        for fault in node.weight_faults:
            reason = fault.waiting_for if fault.waiting_for in _ACTIVATED else "weight_fault"
            found.setdefault((fault.policy_id, reason), []).append((node.node_id, fault))
    for (policy_id, reason), own in sorted(found.items(), key=itemgetter(0)):
        node_id, fault = own[0]
        more = f" (and {len(own) - 1} more)" if len(own) > 1 else ""
        yield Wait(
            stage="activate",
            reason=reason,
            policy_id=policy_id,
            detail=f"{node_id} cannot activate {_place(fault)}: {fault.problem}{more}",
            released_by=_ACTIVATED[reason].format(version=fault.version),
        )


def _engine_faults(connected: Sequence[NodeStatus]) -> Iterator[Wait]:
    """One wait per policy of which a node has an engine that hung."""
    found = [(node.node_id, fault) for node in connected for fault in node.engine_faults]
    hung = [(node_id, fault) for node_id, fault in found if fault.reason == "engine_hung"]
    for policy_id in sorted({fault.policy_id for _, fault in hung}):
        own = [(node_id, fault) for node_id, fault in hung if fault.policy_id == policy_id]
        node_id, fault = own[0]
        more = f" (and {len(own) - 1} more)" if len(own) > 1 else ""
        yield Wait(
            stage="lease",
            reason="engine_hung",
            policy_id=policy_id,
            detail=f"{node_id}, engine {fault.engine}: {fault.detail}{more}",
            released_by="the node starts the next engine by itself and makes the calls in it again; one at a URL is "
            "its owner's to restart",
        )


def _poisonous(nodes: Sequence[NodeStatus]) -> Iterator[Wait]:
    """Nodes that were drained because of what they sent, also when they have left: they stay drained."""
    if found := [f"{one.node_id} ({one.poisoned} episodes)" for one in nodes if one.drain_reason == "poison"]:
        yield Wait(
            stage="lease",
            reason="node_poison",
            detail=f"drained for what they sent (dataflow.max_poison): {some_of(found)}",
            released_by="repair them (`episode.quarantined` in the server's log has the reasons), then "
            "`astraflow nodes undrain NODE`",
        )


def _not_leased(nodes: Sequence[NodeStatus], *, now_ms: int) -> Iterator[Wait]:
    """Nodes that lately pushed what was not leased to them."""
    fresh = (one for one in nodes if one.refused and now_ms - one.refused_time.ToMilliseconds() < _FRESH_MS)
    if found := [f"{one.node_id} ({one.refused} episodes, {one.refused_for})" for one in fresh]:
        yield Wait(
            stage="lease",
            reason="node_refused",
            detail=f"they push what was not leased to them, and it is dropped: {some_of(found)}",
            released_by="they push with the lease that they were given; else revoke their tokens",
        )


def _environment_faults(connected: Sequence[NodeStatus], *, now_ms: int) -> Iterator[Wait]:
    """Nodes that lately gave tasks back because the service of their environment did not answer."""
    since_ms = now_ms - _FRESH_MS
    failed = (one for one in connected if one.environment_fault)
    if found := [one for one in failed if one.environment_fault_time.ToMilliseconds() > since_ms]:
        more = f" (and {len(found) - 1} more nodes)" if len(found) > 1 else ""
        yield Wait(
            stage="lease",
            reason="environment_unavailable",
            detail=f"{found[0].node_id}: {found[0].environment_fault}{more}; its tasks are leased again, at no cost",
            released_by="start the service (`astraflow environment`), or give nodes another --environment",
        )


def _place(fault: WeightFault) -> str:
    inside = f", tile {fault.tile}" if fault.HasField("tile") else ""
    return f"version {fault.version}" + (f", tensor {fault.tensor!r}{inside}" if fault.tensor else "")


def _plugin_faults(faults: Sequence[PluginFault]) -> Iterator[Wait]:
    """One wait per plug-in that does not return, and one per kind that failed lately."""
    for fault in faults:
        if fault.hangs:
            yield Wait(
                stage=_PLUGIN_FAULTS.get(fault.kind, ("lease", ""))[0],
                reason="plugin_hung",
                detail=f"{fault.kind} {fault.name}: {fault.problem}",
                released_by="it returns, or its process is killed at the deadline and the next is asked; correct it",
            )
    for kind, (stage, meanwhile) in _PLUGIN_FAULTS.items():
        own = [fault for fault in faults if fault.kind == kind and not fault.hangs]
        for fault in own[:1]:
            more = f" (and {len(own) - 1} more of these)" if len(own) > 1 else ""
            yield Wait(
                stage=stage,
                reason=f"{kind}_failed",
                detail=f"{fault.name} failed {fault.count} times, last: {fault.problem}{more}; meanwhile {meanwhile}",
                released_by="correct it and restart the server, or create a run of the corrected recipe",
            )


def _lease_waits(
    audit: Audit,
    connected: Sequence[NodeStatus],
    faults: Sequence[PluginFault],
    skipped: int,
    *,
    trains: bool,
) -> list[Wait]:
    if not connected:
        return [
            _lease(
                "no_node",
                "no node is connected",
                "start a node and join it to this server",
            )
        ]
    missing = [policy for policy in audit.policies if policy.lacks_version]
    if missing:
        remedy = (
            "its trainer announces version 0 when it has loaded the initial model; see its log if it does not"
        )
        if any(policy.frozen for policy in missing):
            remedy += "; that of a policy with `train: false` then ends, and may be started again"
        return [
            _lease(
                "no_version",
                f"no announced version of {', '.join(policy.policy_id for policy in missing)}",
                remedy,
            )
        ]
    if not trains:
        return []
    trained = [policy for policy in audit.policies if not (policy.frozen or policy.waits_for_turn_of)]
    full = [policy for policy in trained if policy.credit == 0]
    if audit.quota_left == 0 and len(full) < len(trained):
        detail = f"{audit.leases} leases are out, as many as the run may have (dataflow.max_leases)"
        return [_lease("lease_quota", detail, "nodes finish some of them")]
    if len(full) == len(trained) or not audit.admitted:
        return [_full(policy) for policy in full or trained]
    partly = [*(_full(policy, meanwhile="; tasks are leased for the other policies") for policy in full)]
    partly += [_no_credit(policy) for policy in trained if policy.no_credit > _MANY_UNUSED * policy.settled]
    return partly + _task_waits(audit, faults, skipped)


def _task_waits(audit: Audit, faults: Sequence[PluginFault], skipped: int) -> list[Wait]:
    """Why there are no tasks although there is room for them."""
    if audit.queued_tasks or audit.retries:
        return []
    for fault in faults:
        if fault.kind == "dataset" and not fault.hangs:
            remedy = "correct the data set; it is asked again regularly"
            return [_lease("dataset_failed", fault.problem, remedy)]
    if audit.exhausted:
        return [
            _lease("dataset_exhausted", "the data set has no more tasks", "submit tasks, or finish the run")
        ]
    if skipped >= _MANY_SKIPPED:
        detail = f"curators skipped the last {skipped} tasks of the data set"
        return [
            _lease("tasks_skipped", detail, "a curator proposes one; lower its threshold if it never will")
        ]
    return []


STARTS = {"engine_start": "starts its engine", "weights": "fetches its first weights"}


def _starting_nodes(connected: Sequence[NodeStatus]) -> Iterator[Wait]:
    """Nodes that are not ready for their first task, by what they say."""
    starting = [
        f"{node.node_id} {STARTS[node.waiting_for]}" for node in connected if node.waiting_for in STARTS
    ]
    if starting:
        yield Wait(
            stage="activate",
            reason="node_starting",
            detail=some_of(starting),
            released_by="it ends by itself, and takes minutes for a large model; the engine's log in the node's work "
            "folder says how far it is",
        )


def _makers(connected: Sequence[NodeStatus]) -> Iterator[Wait]:
    """Nodes in which a plug-in of the recipe has not returned from its import or constructor."""
    if found := [f"{one.node_id}, {one.waiting_detail}" for one in connected if one.waiting_detail]:
        yield Wait(stage="lease", reason="plugin_hung", detail=some_of(found), released_by=_MADE)


def _node_waits(policy: PolicyState, connected: Sequence[NodeStatus]) -> Iterator[Wait]:
    """Nodes that serve older weights of a policy than its groups may have, and a policy that none serves of those that
    serve others.
    """
    if policy.version is None:
        return
    at_work = [node for node in connected if node.serving_versions]
    served = {
        node.node_id: node.serving_versions[policy.policy_id]
        for node in at_work
        if policy.policy_id in node.serving_versions
    }
    behind = {
        name: version for name, version in served.items() if policy.version - version > policy.max_staleness
    }
    if behind:
        names = some_of([f"{name} serves {version}" for name, version in behind.items()])
        yield Wait(
            stage="lease",
            policy_id=policy.policy_id,
            reason="node_behind",
            detail=f"{names}; the newest version is {policy.version}, groups may be {policy.max_staleness} older: "
            "these nodes sample nothing for the policy",
            released_by="the node loads a newer version (`weights.` events of its log say what holds it up); "
            "a larger max_staleness lets it sample meanwhile",
        )
    if at_work and not served:
        names = ", ".join(node.node_id for node in at_work[:5])
        yield Wait(
            stage="lease",
            policy_id=policy.policy_id,
            reason="policy_not_served",
            detail=f"no connected node has an engine for it now, of {names}",
            released_by="a node brings one up again by itself; `engine.lost` in its log says why it went",
        )


def _lease(reason: str, detail: str, released_by: str) -> Wait:
    return Wait(stage="lease", reason=reason, detail=detail, released_by=released_by)


def _refused(refused: Refused, connected: Sequence[NodeStatus]) -> Wait:
    names = ", ".join(node.node_id for node in connected[:5])
    return Wait(
        stage="lease",
        reason="no_capable_node",
        detail=f"{refused.count} tasks were refused by every connected node ({names}), for example {refused.example}",
        released_by="join a node that can run them; `astraflow trace TASK_ID` says which nodes refused",
        since_ms=refused.since_ms,
    )


def _no_credit(policy: PolicyState) -> Wait:
    share = policy.no_credit / policy.settled
    detail = (
        f"{policy.no_credit} of its {policy.settled} trajectories ({share:.0%}) were sampled while it had no room, and "
        "dropped"
    )
    return Wait(
        stage="lease",
        policy_id=policy.policy_id,
        reason="no_credit",
        detail=detail,
        released_by="the workflow leaves out roles whose `wants_trajectory` is False, or dataflow.admit is `all`",
    )


def _full(policy: PolicyState, *, meanwhile: str = "") -> Wait:
    if policy.held:
        return _behind_barrier(policy)
    detail = (
        f"{policy.outstanding} groups outstanding at acceptance {policy.acceptance:.2f}, {policy.ready} ready, "
        f"{policy.unpublished} unpublished: the staleness window is full{meanwhile}"
    )
    return Wait(
        stage="lease",
        policy_id=policy.policy_id,
        reason="staleness_window",
        detail=detail,
        released_by=_window_release(policy),
    )


def _behind_barrier(policy: PolicyState) -> Wait:
    """A barrier of the recipe holds the tasks of the next batch back."""
    why, *training = policy.held.split()
    if training:
        named = f"step {training[1]} of {training[0]}"
        detail = f"nothing is leased until {named} has its version (dataflow.barrier: phase)"
        released_by = "its trainer finishes the step and announces the version"
    elif why == "ended":
        detail = "its trainer has ended, and nothing is sampled for it (dataflow.barrier)"
        released_by = "a trainer claims the policy"
    else:
        groups = f"{policy.outstanding} groups outstanding, {policy.ready} of {policy.groups_per_step} ready"
        detail = f"the tasks of one batch are out (dataflow.barrier): {groups}"
        released_by = "the trainer binds the batch when its groups are ready"
    return Wait(
        stage="lease",
        policy_id=policy.policy_id,
        reason="barrier",
        detail=detail,
        released_by=released_by,
    )


def _window_release(policy: PolicyState) -> str:
    """What happens next on the way to room in the window: only a version, or a dropped group, makes any."""
    trained = [step for step in policy.unpublished_steps if step <= policy.finished_step]
    if trained:
        return f"the trainer announces the version of step {trained[0]}"
    if policy.unpublished_steps:
        return f"the trainer finishes step {policy.unpublished_steps[0]} and announces its version"
    if policy.ready >= policy.groups_per_step:
        return "the trainer takes a batch of the ready groups, trains on it and announces the version"
    return "nodes finish the outstanding groups; the step trained on them then announces its version"


def _turn_wait(policy: PolicyState) -> Wait:
    return Wait(
        stage="batch",
        policy_id=policy.policy_id,
        reason="turn",
        detail=f"it is frozen after step {policy.finished_step}: it is the turn of {policy.turn}",
        released_by=f"{policy.turn} finishes step {policy.turn_ends_step}; what it waits for stands beside this",
        since_ms=policy.wait_since_ms,
    )


def _fresh_report(policy: PolicyState, *, now_ms: int) -> TrainerReport | None:
    """What its trainer waits for by its own word, while that is fresh."""
    report = policy.report
    return (
        report
        if report and report.reason in _REPORTED and now_ms - report.heard_ms < _REPORT_LIFE_MS
        else None
    )


def _reported_waits(policy: PolicyState, *, now_ms: int) -> Iterator[Wait]:
    report = _fresh_report(policy, now_ms=now_ms)
    if report is None:
        return
    stage, meaning, released_by = _REPORTED[report.reason]
    share = "" if report.progress is None else f"{report.progress:.0%} done: "
    yield Wait(
        stage=stage,
        policy_id=policy.policy_id,
        reason=report.reason,
        detail=f"{share}{report.detail or meaning}",
        released_by=released_by,
        since_ms=report.since_ms,
        progress=report.progress,
    )


def _heard_ms(policy: PolicyState, *, now_ms: int, jumped_ms: int) -> int:
    """When its trainer called last, by a clock that was set since; 0 when it released the policy."""
    if not policy.heard_ms or jumped_ms <= policy.heard_ms <= now_ms:
        return policy.heard_ms
    return jumped_ms or now_ms


def _batch_waits(policy: PolicyState, *, now_ms: int, heard_ms: int, lease_ms: float) -> Iterator[Wait]:
    if policy.doubt:
        yield Wait(
            stage="batch",
            policy_id=policy.policy_id,
            reason="state_in_doubt",
            detail=policy.doubt,
            released_by="restore the Redis that has the run, or start the trainer with --accept-data-loss",
        )
    elif policy.wait == "turn" and policy.wait_until_ms >= now_ms:
        yield _turn_wait(policy)
    elif policy.wait and policy.wait_until_ms >= now_ms:
        stage = "publish" if policy.wait == "publish" else "batch"
        detail = (
            f"{policy.ready} of {policy.groups_per_step} groups are ready, {policy.outstanding} outstanding"
        )
        if policy.wait == "batch_needs":
            detail += f"; {policy.lack}"
        yield Wait(
            stage=stage,
            policy_id=policy.policy_id,
            reason=policy.wait,
            detail=detail,
            released_by=_BATCH_RELEASES.get(policy.wait, "the trainer's next call"),
            since_ms=policy.wait_since_ms,
        )
    elif _fresh_report(policy, now_ms=now_ms):
        return  # a trainer is there, and busy
    elif policy.epoch == 0 or (policy.turn and not policy.heard_ms):
        yield Wait(
            stage="batch",
            policy_id=policy.policy_id,
            reason="no_trainer",
            detail="its trainer has ended in its turn, which the others wait for"
            if policy.epoch
            else "no trainer has claimed the policy",
            released_by="its trainer claims it: start one, or wait while the one that runs loads its model",
        )
    elif heard_ms and now_ms - heard_ms > lease_ms:
        silent_s, bound_s = (now_ms - heard_ms) // 1000, lease_ms / 1000
        yield Wait(
            stage="batch",
            policy_id=policy.policy_id,
            reason="trainer_silent",
            detail=f"trainer {policy.trainer} claimed it and has not called for {silent_s} s, the bound is {bound_s:g}",
            released_by="it calls again; if it hangs or its machine is gone, another trainer takes over where it was",
            since_ms=heard_ms,
        )


def _publish_waits(policy: PolicyState) -> Iterator[Wait]:
    trained = [step for step in policy.unpublished_steps if step <= policy.finished_step]
    if not trained:
        return
    detail = f"steps {trained} are trained, their versions are not announced"
    yield Wait(
        stage="publish",
        policy_id=policy.policy_id,
        reason="unpublished",
        detail=detail,
        released_by="the trainer uploads and announces them; if that takes long, see its log",
        since_ms=policy.finish_ms or None,
    )


def _evaluation_waits(
    evaluations: Sequence[StoredEvaluation], connected: Sequence[NodeStatus]
) -> Iterator[Wait]:
    for item in evaluations:
        if item.state == "open" and not any(
            all(
                node.serving_versions.get(policy_id) == version
                for policy_id, version in item.versions.items()
            )
            for node in connected
        ):
            names = ", ".join(
                f"version {version} of {policy_id}" for policy_id, version in item.versions.items()
            )
            have = f"{names}: {item.done} of {item.planned} samples"
            yield Wait(
                stage="evaluate",
                policy_id=next(iter(item.versions)) if len(item.versions) == 1 else "",
                reason="no_node_at_version",
                detail=f"{have}; no connected node serves that now",
                released_by="a node fetches what it lacks; once newer versions wait, it is given up after a while",
            )
