"""What the metrics page tells of one run; the server brings it up to date at least once a minute.

Every process of a server, and every server over one Redis, exports the same: take the maximum over them. Called by
reporting.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from astraflow.dataflow.v1 import admin_service_pb2, version_pb2
from astraflow.dataflow.v1.account_pb2 import TrajectoryAccount
from astraflow_dataflow.records import ArchiveState, PolicyState
from astraflow_dataflow.rules.faults import PluginFault
from astraflow_dataflow.rules.shadows import Shadow
from astraflow_dataflow.rules.staleness import summarize
from astraflow_dataflow.rules.waits import Wait
from astraflow_kit.metrics import Metrics

_PLACES = ("ingested", "trained", "in_batch", "ready", "assembling", "evaluated")


@dataclass(frozen=True)
class RunGauges:
    """The gauges of one run."""

    metrics: Metrics
    run_id: str

    def account(self, policies: Iterable[PolicyState], account: TrajectoryAccount) -> None:
        """Where the trajectories are, and what each policy has of groups."""
        places: dict[tuple[str, ...], float] = {(place,): getattr(account, place) for place in _PLACES}
        places |= {(f"dropped_{reason}",): count for reason, count in account.dropped.items()}
        self._replace("trajectories", places)
        self._set("conservation_error", account.conservation_error)
        for policy in policies:
            ages = summarize(policy.staleness)
            for stat, age in (("p50", ages.p50), ("p99", ages.p99), ("max", ages.largest)):
                self._set("staleness_versions", age, policy=policy.policy_id, stat=stat)
            for name, value in {
                "version": -1 if policy.version is None else policy.version,
                "ready_groups": policy.ready,
                "outstanding_groups": policy.outstanding,
                "credit_groups": policy.credit,
                "acceptance": policy.acceptance,
            }.items():
                self._set(name, value, policy=policy.policy_id)

    def waits(self, waited: Iterable[tuple[Wait, int]]) -> None:
        """What waits now, with the milliseconds since it began."""
        self._replace(
            "wait_seconds",
            {(wait.policy_id, wait.stage, wait.reason): waited_ms / 1000 for wait, waited_ms in waited},
        )

    def balances(self, verdicts: Iterable[admin_service_pb2.Balance]) -> None:
        """Who waits for whom, of each policy that has a verdict."""
        self._replace("balance", {(each.policy_id, each.verdict): 1.0 for each in verdicts})

    def fleet(
        self, connected: Sequence[admin_service_pb2.NodeStatus], versions: Iterable[version_pb2.Version]
    ) -> None:
        """The connected nodes, and the newest version of each policy with how far they are behind it."""
        self._set("nodes_connected", len(connected))
        self._set(
            "weight_faults", sum(not fault.waiting_for for node in connected for fault in node.weight_faults)
        )
        for version in versions:
            policy = version.policy_id
            lags = (node.version_lags[policy] for node in connected if policy in node.version_lags)
            self._set("version_lag", max(lags, default=0), policy=policy)
            self._set("version_density", version.density, policy=policy)
            self._set("version_bytes", version.delta_bytes, policy=policy, kind="delta")
            self._set("version_bytes", version.snapshot_bytes, policy=policy, kind="snapshot")

    def autoscaling(self, state: admin_service_pb2.Autoscaling) -> None:
        """How many nodes there should be, and what that was decided by."""
        self._replace("pool_target_nodes", {(pool,): nodes for pool, nodes in state.pools.items()})
        for name in ("wait", "busy", "staleness"):
            self._set("autoscaling_share", getattr(state, f"{name}_share"), share=name)
        self._set("autoscaling_turns", state.turns)

    def archive(self, state: ArchiveState) -> None:
        """What never got into the archive."""
        self._set("archive_given_up", state.given_up)

    def plugin_faults(self, faults: Iterable[PluginFault]) -> None:
        """The faults of plug-ins so far."""
        self._replace("plugin_faults", {(fault.kind, fault.name): fault.count for fault in faults})

    def shadows(self, shadows: Sequence[Shadow]) -> None:
        """What plug-ins in shadow mode decided."""
        self._replace("shadow_decisions", {(shadow.kind, shadow.name): shadow.asked for shadow in shadows})
        self._replace(
            "shadow_differences", {(shadow.kind, shadow.name): shadow.differs for shadow in shadows}
        )

    def _set(self, name: str, value: float, **labels: str) -> None:
        self.metrics.set(f"astraflow_dataflow_{name}", value, run=self.run_id, **labels)

    def _replace(self, name: str, values: Mapping[tuple[str, ...], float]) -> None:
        self.metrics.replace(f"astraflow_dataflow_{name}", values, run=self.run_id)
