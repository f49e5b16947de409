"""The verdict of `astraflow why`: what a run is bound by, from what its stages waited for in several looks.

Pure. A look is the list of waits at one moment; the share of looks in which a stage waited stands for the share
of time, so a verdict comes with how many looks it rests on. Blocked beats bound: where something can never move
by itself, no share matters.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from astraflow.commands.waits import in_order
from astraflow.dataflow.v1 import admin_service_pb2 as pb

_BLOCKING = {
    "server_unreachable": "the dataflow server cannot be reached",
    "server_silent": "the dataflow server does not answer",
    "redis_silent": "the server's Redis does not answer",
    "redis_read_only": "the server's Redis may not be written",
    "redis_disk_full": "the server's Redis cannot write its files",
    "redis_full": "the server's Redis is full",
    "payloads_away": "what holds the payloads does not answer",
    "payloads_lost": "payloads that runs need are gone",
    "state_in_doubt": "the server lost what its trainer knows",
    "store_missing": "the weight store is not there",
    "store_read_only": "the weight store may not be written",
    "store_full": "the weight store is full",
    "store_unreachable": "the weight store does not answer",
    "trainer_hung": "a trainer stands still in a step",
    "trainer_silent": "a trainer is silent",
    "no_node": "no node works for the run",
    "no_capable_node": "no node can run the task",
    "no_version": "no weights are announced yet",
    "no_trainer": "no trainer has claimed the policy",
    "dataset_exhausted": "the data set has no more tasks",
    "dataset_failed": "the data set fails",
    "no_node_at_version": "no node serves the version to evaluate",
    "paused": "an operator paused the trainer",
}
"""Waits that time alone does not end, in words."""
_STARTING = {
    "warm_start": "the trainer makes the initial model",
    "model_loading": "the trainer loads its model",
    "node_starting": "nodes start their engines",
}
_TELLING_SHARE = 0.2
"""A stage that waits less than this share of the time does not bound the run."""
_TELLING_ROW = 3
"""Fewer failures in a row are what retries are for."""


class Bound(StrEnum):
    """What decides the speed of a run."""

    FAILING = "failing"
    BLOCKED = "blocked"
    STARTING = "starting"
    ROLLOUT = "rollout-bound"
    TRAINER = "trainer-bound"
    STORE = "store-bound"
    BALANCED = "balanced"
    FINISHED = "finished"


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What a run is bound by; `share` of `looks` show it, `because` says it for people."""

    bound: Bound
    share: float
    looks: int
    because: str
    policy_id: str = ""

    @property
    def sentence(self) -> str:
        """One line for people."""
        return f"{self.bound.value}: {self.because}"


def find_failure(failures: Sequence[pb.TaskFailures], *, stopped_for: str = "") -> Verdict | None:
    """Return that the run was stopped, or that its tasks fail; None while tasks are completed. Blocked or not, nothing
    comes of a run whose tasks fail.
    """
    if stopped_for:
        return Verdict(
            bound=Bound.FAILING, share=1.0, looks=1, because=f"the server stopped the run: {stopped_for}"
        )
    worst = next((item for item in failures if item.in_a_row >= (_TELLING_ROW if item.task_id else 1)), None)
    if worst is None:
        return None
    what = "leases" if worst.task_id else "batches"
    because = f"{worst.in_a_row} {what} in a row failed alike: {worst.reason}: {worst.detail}"
    return Verdict(bound=Bound.FAILING, share=1.0, looks=1, because=because)


def find_bottleneck(looks: Sequence[Sequence[pb.Wait]], *, over_s: float) -> Verdict:
    """Return what the run was bound by over `looks`, taken within `over_s` seconds; the newest is the last."""
    starting = [wait for wait in looks[-1] if wait.reason in _STARTING]
    blocked = [wait for wait in looks[-1] if _blocks(wait, starting=bool(starting))]
    if blocked:
        return _of_first(Bound.BLOCKED, in_order(blocked)[0], _BLOCKING, looks=len(looks))
    if starting:
        return _of_first(Bound.STARTING, in_order(starting)[0], _STARTING, looks=len(looks))
    counts: dict[tuple[Bound, str], int] = {}
    for look in looks:
        for key in {found for wait in look if (found := _bound_of(wait, look))}:
            counts[key] = counts.get(key, 0) + 1
    (bound, policy_id), count = max(
        counts.items(), key=lambda item: item[1], default=((Bound.BALANCED, ""), 0)
    )
    share = count / len(looks)
    if share < _TELLING_SHARE:
        most = max(share, _TELLING_SHARE)
        because = f"no stage waited more than {most:.0%} of the last {over_s:.0f} s"
        return Verdict(bound=Bound.BALANCED, share=share, looks=len(looks), because=because)
    because = (
        f"{_WORDS[bound].format(policy=policy_id)} in {share:.0%} of {len(looks)} checks over {over_s:.0f} s"
    )
    return Verdict(bound=bound, share=share, looks=len(looks), because=because, policy_id=policy_id)


_WORDS = {
    Bound.ROLLOUT: "the trainer of {policy} waited for finished groups",
    Bound.TRAINER: "nodes waited for the trainer of {policy} to take a batch",
    Bound.STORE: "trained weights of {policy} waited to be published",
}


def _bound_of(wait: pb.Wait, look: Sequence[pb.Wait]) -> tuple[Bound, str] | None:
    """What one wait says; nodes held back by unpublished versions wait for the store, not for training."""
    if wait.stage == "batch" and wait.reason == "ready_groups":
        return Bound.ROLLOUT, wait.policy_id
    if wait.stage == "publish" and wait.reason == "publish":
        return Bound.STORE, wait.policy_id
    if wait.stage == "lease" and wait.reason == "staleness_window":
        unpublished = any(
            other.reason == "unpublished" and other.policy_id == wait.policy_id for other in look
        )
        return (Bound.STORE if unpublished else Bound.TRAINER), wait.policy_id
    return None


def _blocks(wait: pb.Wait, *, starting: bool) -> bool:
    """Whether time alone does not end it; weights that are still made are announced when they are."""
    ends = wait.stage == "evaluate" or (starting and wait.reason == "no_version")
    return wait.reason in _BLOCKING and not ends


def _of_first(bound: Bound, first: pb.Wait, words: Mapping[str, str], *, looks: int) -> Verdict:
    share = f", {first.progress:.0%} done" if first.HasField("progress") else ""
    whose = f" of {first.policy_id}" if first.policy_id else ""
    return Verdict(
        bound=bound,
        share=1.0,
        looks=looks,
        because=f"{words[first.reason]}{share} ({first.stage}{whose})",
        policy_id=first.policy_id,
    )
