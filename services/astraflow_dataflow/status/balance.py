"""Balance: do nodes wait for the trainer of a policy, or the trainer for them, and how many nodes would it keep busy?

Pure, over the newest steps of a policy and what its nodes hold. A trainer that waits for groups the share w of its
time takes 1 / (1 − w) times as many steps with that many times the nodes; waiting to publish is not theirs to mend.
Called by reporting.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from astraflow.dataflow.v1 import admin_service_pb2 as pb

STEPS = 20
"""The newest steps that a verdict is about."""
_WAITS, _IDLES = 0.1, 0.5
"""Shares from which on a trainer waits, and nodes are idle."""


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """What nodes could run at once, and what they run now: episodes of the whole run."""

    capacity: int
    busy: int

    @property
    def idle_share(self) -> float:
        """Share of the capacity that runs nothing; 0 of no nodes."""
        return max(0.0, 1 - self.busy / self.capacity) if self.capacity else 0.0


def fleet(nodes: Sequence[pb.NodeStatus]) -> Fleet:
    """Return what the connected nodes could run and run."""
    connected = [node for node in nodes if node.connected]
    return Fleet(
        capacity=sum(node.max_concurrent_tasks for node in connected),
        busy=sum(node.leases for node in connected),
    )


def balance(policy_id: str, steps: Sequence[Mapping[str, float]], nodes: Fleet) -> pb.Balance | None:
    """Return the verdict over steps with their `wait_s`, `train_s` and `publish_wait_s`; None when none has these."""
    timed = [step for step in steps if step.get("wait_s", -1) >= 0 and step.get("train_s", -1) >= 0]
    waited_s = sum(step["wait_s"] for step in timed)
    total_s = waited_s + sum(step["train_s"] for step in timed)
    if total_s <= 0:
        return None
    publishing_s = min(waited_s, sum(step.get("publish_wait_s", 0.0) for step in timed))
    waits, publishes = waited_s / total_s, publishing_s / total_s
    verdict = pb.Balance(policy_id=policy_id, trainer_wait_share=waits, num_steps=len(timed))
    if waits >= _WAITS and publishes > waits - publishes:
        verdict.verdict = "publish_bound"
        verdict.sentence = (
            f"publish-bound: the trainer waits {publishes:.0%} for its own versions to be published; "
            "more nodes change nothing, a faster store or fewer bytes a version do"
        )
    elif waits >= _WAITS:
        verdict.verdict, verdict.node_factor = "rollout_bound", _filling(waits - publishes)
        verdict.sentence = _rollout_bound(waits, verdict.node_factor, nodes)
    elif nodes.capacity and nodes.idle_share >= _IDLES:
        verdict.verdict = "trainer_bound"
        verdict.node_factor = max(1, nodes.busy) / nodes.capacity
        verdict.sentence = (
            f"trainer-bound: nodes have {nodes.busy} of {nodes.capacity} places busy and the trainer waits {waits:.0%}"
            f"; {verdict.node_factor:.1f}× nodes would do"
        )
    else:
        verdict.verdict = "balanced"
        verdict.sentence = (
            f"balanced: the trainer waits {waits:.0%} and nodes are {1 - nodes.idle_share:.0%} busy"
        )
    return verdict


def _filling(waits: float) -> float:
    return min(100.0, 1 / max(0.01, 1 - waits))


def _rollout_bound(waits: float, factor: float, nodes: Fleet) -> str:
    said = f"rollout-bound: the trainer waits {waits:.0%}; "
    if not nodes.capacity:
        return said + "no node is connected"
    if nodes.idle_share >= _IDLES:
        return said + (
            f"but nodes have only {nodes.busy} of {nodes.capacity} places busy: see what they wait for, "
            "more of them would not help yet"
        )
    return said + f"{factor:.1f}× nodes would fill it"
