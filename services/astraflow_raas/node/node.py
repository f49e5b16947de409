"""The parts of one node put together: endpoint, reward, policies with engines and weights, session, pusher, worker.

Invariant: parts know nothing of each other but what is passed here; the order of `services` is the order of
start, and its reverse the order of the end: no new work first, then the last pushes, then the engines. Built
by `server` once the node has joined; the status pages read it.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from astraflow.dataflow.v1 import task_service_pb2, version_pb2
from astraflow_kit.lifecycle import Service
from astraflow_kit.metrics import Metrics
from astraflow_raas.agents.endpoint import Endpoint
from astraflow_raas.environments.served import ServedEnvironments
from astraflow_raas.grading.scoring import RewardScorer
from astraflow_raas.node.engine_host import AdapterHost, ChildHost, RemoteHost
from astraflow_raas.node.load_watch import LoadWatch
from astraflow_raas.policies.served_policy import ServedPolicy
from astraflow_raas.policies.weight_sync import WeightSync
from astraflow_raas.push.pushing import Pusher
from astraflow_raas.work.session import Session
from astraflow_raas.work.worker import Worker

_MAX_WEIGHT_FAULTS = 16
_MAX_LOADS = 64


@dataclass(frozen=True, kw_only=True)
class PolicyParts:
    """What serves one policy on this node."""

    policy: ServedPolicy
    weights: WeightSync
    hosts: Sequence[ChildHost | RemoteHost | AdapterHost]
    """One per engine."""

    @property
    def waiting_for(self) -> str:
        """What the policy lacks, as a slug; empty when it is served."""
        return self.weights.waiting_for or ("" if self.policy.is_served else "engine_start")


class PolicyTable:
    """All policies of the run on this node."""

    def __init__(self, parts: Mapping[str, PolicyParts], *, spared: Collection[str] = ()) -> None:
        """`spared` are policies that a workflow may leave out for a while, as long as another of them is served."""
        self.parts = parts
        self._spared = frozenset(spared)

    @property
    def tokens_sampled(self) -> int:
        """Tokens since the process started."""
        return sum(part.policy.num_tokens for part in self.parts.values())

    @property
    def engine_restarts(self) -> int:
        """Engines lost since the process started."""
        return sum(host.num_restarts for part in self.parts.values() for host in part.hosts)

    @property
    def waiting_for(self) -> str:
        """What keeps the node from working: of the first policy that lacks something and is needed. All are until each
        was served once.
        """
        lacking = {name: part for name, part in self.parts.items() if part.waiting_for}
        can_go_on = self._spared - lacking.keys() and all(
            name in self._spared and part.policy.version is not None and not part.policy.is_needed
            for name, part in lacking.items()
        )
        return "" if can_go_on else next((part.waiting_for for part in lacking.values()), "")

    def announce(self, version: version_pb2.Version) -> None:
        """Hand an announced version to its policy; versions of policies that this node does not serve are
        ignored."""
        part = self.parts.get(version.policy_id)
        if part is not None:
            part.weights.announce(version)


def node_state(policies: PolicyTable, pusher: Pusher, load: LoadWatch) -> task_service_pb2.Credits:
    """What the server learns of the node with its credits; their number is the worker's to add."""
    faults = (part.weights.fault for part in policies.parts.values())
    hosts = [host for part in policies.parts.values() for host in part.hosts]
    allowance = load.allowance
    return task_service_pb2.Credits(
        serving_versions={
            name: part.policy.version
            for name, part in policies.parts.items()
            if part.policy.is_served and part.policy.version is not None
        },
        tokens_sampled=policies.tokens_sampled,
        engine_restarts=policies.engine_restarts,
        weight_faults=[fault for fault in faults if fault is not None][:_MAX_WEIGHT_FAULTS],
        waiting_for=policies.waiting_for or pusher.waiting_for,
        max_episodes=allowance.episodes,
        bounded_by=allowance.bounded_by,
        engine_loads=load.loads[:_MAX_LOADS],
        engine_faults=[host.fault for host in hosts if host.fault is not None][:_MAX_LOADS],
    )


@dataclass(frozen=True, kw_only=True)
class Node:
    """A joined node."""

    run_id: str
    node_id: str
    policies: PolicyTable
    endpoint: Endpoint
    served: ServedEnvironments
    scorers: Sequence[RewardScorer]
    session: Session
    pusher: Pusher
    load: LoadWatch
    worker: Worker

    @property
    def services(self) -> Sequence[Service]:
        """Everything with a life of its own, in the order of start."""
        engines: list[Service] = []
        for part in self.policies.parts.values():
            engines += [*part.hosts, part.weights]
        return [self.endpoint, self.served, *self.scorers, *engines, self.pusher, self.load, self.worker]

    @property
    def waiting_for(self) -> str:
        """What the node waits for, as a slug; empty when it works."""
        if self.worker.draining:
            return "drain"
        if self.worker.without_server:
            return "token" if self.worker.refusal else "server"
        return self.policies.waiting_for or self.pusher.waiting_for

    def publish_gauges(self, metrics: Metrics) -> None:
        """Bring the gauges of the metrics page up to date."""
        metrics.set("astraflow_raas_unacked_episodes", self.pusher.num_unacked)
        metrics.set("astraflow_raas_spool_episodes", self.pusher.num_kept)
        self.load.publish_gauges(metrics)
        for name, part in self.policies.parts.items():
            metrics.set("astraflow_raas_tokens", part.policy.num_tokens, policy=name)
            if part.policy.version is not None:
                metrics.set("astraflow_raas_serving_version", part.policy.version, policy=name)
