"""Waits: what each stage of the data path waits for now, since when, and what would release it.

Pure: computed from one audit, the nodes and the evaluations. A wait is named by (stage, policy, reason);
`WaitBook` remembers when each was first seen in this process. Called by reporting, shown by Status and `why`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from astraflow.dataflow.v1.admin_service_pb2 import NodeStatus
from astraflow.dataflow.v1.version_pb2 import WeightFault
from astraflow_dataflow.records import Audit, Life, PolicyState, Refused, StoredEvaluation
from astraflow_dataflow.rules.faults import PluginFault

_BATCH_RELEASES = {
    "ready_groups": "nodes finish the outstanding groups; if there are none, see what `lease` waits for",
    "publish": "the trainer announces the versions it has trained",
    "selector": "the selector takes groups; it is asked again when another one is ready",
}

# Kind of a failed plug-in: the stage that shows it, and what becomes of the stage's work.
_PLUGIN_FAULTS = {
    "curator": ("lease", "tasks are leased as they were drawn"),
    "filter": ("batch", "groups it fails on are dropped as filter_failed"),
    "selector": ("batch", "batches take the groups whose deadline is nearest"),
}
_MANY_SKIPPED = 1024


@dataclass(frozen=True, kw_only=True)
class Wait:
    """One stage that waits; `since_ms` is set where Redis knows it, else the book does."""

    stage: str
    reason: str
    detail: str
    released_by: str
    policy_id: str = ""
    since_ms: int | None = None


class WaitBook:
    """Remembers since when each wait has lasted. Times are milliseconds of Redis' clock."""

    def __init__(self) -> None:
        self._since_ms: dict[tuple[str, str, str], int] = {}

    def waited_ms(self, waits: Iterable[Wait], *, now_ms: int) -> list[tuple[Wait, int]]:
        """Return each wait with how long it has lasted, and forget those that are over."""
        current = {(wait.stage, wait.policy_id, wait.reason): wait for wait in waits}
        self._since_ms = {key: self._since_ms.get(key, now_ms) for key in current}
        return [
            (wait, max(0, now_ms - (wait.since_ms if wait.since_ms is not None else self._since_ms[key])))
            for key, wait in current.items()
        ]


def current_waits(
    audit: Audit,
    nodes: Sequence[NodeStatus],
    evaluations: Sequence[StoredEvaluation],
    *,
    faults: Sequence[PluginFault] = (),
    skipped: int = 0,
    refused: Refused | None = None,
) -> list[Wait]:
    """Return what waits now; empty when all flows."""
    if audit.life is Life.FINISHED:
        return []
    connected = [node for node in nodes if node.connected]
    waits = [*_evaluation_waits(evaluations, connected)]
    if refused is not None and refused.count:
        waits.append(_refused(refused, connected))
    if audit.life is Life.ACTIVE:
        waits += _lease_waits(audit, connected, faults, skipped)
    waits += _plugin_faults(faults)
    waits += _weight_faults(connected)
    for policy in audit.policies:
        waits += _batch_waits(policy, now_ms=audit.now_ms)
        waits += _publish_waits(policy)
    return waits


def _weight_faults(connected: Sequence[NodeStatus]) -> Iterator[Wait]:
    """One wait per policy that a node cannot bring up to date."""
    found = [(node.node_id, fault) for node in connected for fault in node.weight_faults]
    for policy_id in sorted({fault.policy_id for _, fault in found}):
        own = [(node_id, fault) for node_id, fault in found if fault.policy_id == policy_id]
        node_id, fault = own[0]
        more = f" (and {len(own) - 1} more)" if len(own) > 1 else ""
        yield Wait(
            stage="activate",
            reason="weight_fault",
            policy_id=policy_id,
            detail=f"{node_id} serves an older version: {_place(fault)}: {fault.problem}{more}",
            released_by=f"the damaged object is repaired; `astraflow weights verify {fault.version}` names it",
        )


def _place(fault: WeightFault) -> str:
    inside = f", tile {fault.tile}" if fault.HasField("tile") else ""
    return f"version {fault.version}" + (f", tensor {fault.tensor!r}{inside}" if fault.tensor else "")


def _plugin_faults(faults: Sequence[PluginFault]) -> Iterator[Wait]:
    """One wait per kind of plug-in that failed lately."""
    for kind, (stage, meanwhile) in _PLUGIN_FAULTS.items():
        own = [fault for fault in faults if fault.kind == kind]
        for fault in own[:1]:
            more = f" (and {len(own) - 1} more of these)" if len(own) > 1 else ""
            yield Wait(
                stage=stage,
                reason=f"{kind}_failed",
                detail=f"{fault.name} failed {fault.count} times, last: {fault.problem}{more}; meanwhile {meanwhile}",
                released_by="correct it and restart the server, or create a run of the corrected recipe",
            )


def _lease_waits(
    audit: Audit, connected: Sequence[NodeStatus], faults: Sequence[PluginFault], skipped: int
) -> list[Wait]:
    if not connected:
        return [
            _lease(
                "no_node",
                "no node is connected",
                "start a node and join it to this server",
            )
        ]
    missing = [policy.policy_id for policy in audit.policies if policy.version is None]
    if missing:
        return [
            _lease(
                "no_version",
                f"no announced version of {', '.join(missing)}",
                "its trainer announces version 0 when it has loaded the initial model; see its log if it does not",
            )
        ]
    full = [policy for policy in audit.policies if policy.credit == 0]
    if len(full) == len(audit.policies):
        return [_full(policy) for policy in full]
    if audit.queued_tasks or audit.retries:
        return []
    for fault in faults:
        if fault.kind == "dataset":
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


def _full(policy: PolicyState) -> Wait:
    detail = (
        f"{policy.outstanding} groups outstanding at acceptance {policy.acceptance:.2f}, {policy.ready} ready, "
        f"{policy.unpublished} unpublished: the staleness window is full"
    )
    return Wait(
        stage="lease",
        policy_id=policy.policy_id,
        reason="staleness_window",
        detail=detail,
        released_by=_window_release(policy),
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


def _batch_waits(policy: PolicyState, *, now_ms: int) -> Iterator[Wait]:
    if policy.wait and policy.wait_until_ms >= now_ms:
        stage = "publish" if policy.wait == "publish" else "batch"
        detail = (
            f"{policy.ready} of {policy.groups_per_step} groups are ready, {policy.outstanding} outstanding"
        )
        yield Wait(
            stage=stage,
            policy_id=policy.policy_id,
            reason=policy.wait,
            detail=detail,
            released_by=_BATCH_RELEASES.get(policy.wait, "the trainer's next call"),
            since_ms=policy.wait_since_ms,
        )
    elif policy.epoch == 0:
        yield Wait(
            stage="batch",
            policy_id=policy.policy_id,
            reason="no_trainer",
            detail="no trainer has claimed the policy",
            released_by="its trainer claims it: start one, or wait while the one that runs loads its model",
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
            node.serving_versions.get(item.policy_id) == item.version for node in connected
        ):
            have = f"version {item.version}: {item.samples} of {item.planned} samples"
            yield Wait(
                stage="evaluate",
                policy_id=item.policy_id,
                reason="no_node_at_version",
                detail=f"{have}; no connected node serves it now",
                released_by="a node fetches that version; a superseded evaluation is given up after a while",
            )
