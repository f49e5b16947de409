"""The typed stores of one process, over one Redis or cluster.

One value to pass around, so that a module says `store.batches.ack(…)` and never sees Redis. Built by `server`
and by tests.
"""

from __future__ import annotations

from dataclasses import dataclass

from astraflow_dataflow.store.admin import AdminStore
from astraflow_dataflow.store.audit import AuditStore
from astraflow_dataflow.store.batches import BatchStore, VersionStore
from astraflow_dataflow.store.episodes.archive import ArchiveStore
from astraflow_dataflow.store.episodes.commits import EpisodeStore
from astraflow_dataflow.store.homes.deletion import Deletions
from astraflow_dataflow.store.homes.redis import Redis
from astraflow_dataflow.store.payloads.packs import Payloads
from astraflow_dataflow.store.plugin_states import PluginStateStore
from astraflow_dataflow.store.runs import EvaluationStore, NodeStore, RunStore
from astraflow_dataflow.store.tasks import TaskStore


@dataclass(frozen=True, kw_only=True)
class Store:
    """The typed stores over one connection."""

    connection: Redis
    runs: RunStore
    deletions: Deletions
    nodes: NodeStore
    evaluations: EvaluationStore
    tasks: TaskStore
    episodes: EpisodeStore
    batches: BatchStore
    versions: VersionStore
    audits: AuditStore
    admin: AdminStore
    plugin_states: PluginStateStore
    archive: ArchiveStore
    payloads: Payloads

    @classmethod
    def over(cls, connection: Redis, payloads: Payloads | None = None) -> Store:
        """Return the stores over `connection`; without `payloads`, they are in the same Redis."""
        payloads = payloads or Payloads(connection)
        return cls(
            connection=connection,
            runs=RunStore(connection),
            deletions=Deletions(connection, payloads),
            nodes=NodeStore(connection),
            evaluations=EvaluationStore(connection),
            tasks=TaskStore(connection),
            episodes=EpisodeStore(connection, payloads),
            batches=BatchStore(connection),
            versions=VersionStore(connection),
            audits=AuditStore(connection),
            admin=AdminStore(connection),
            plugin_states=PluginStateStore(connection),
            archive=ArchiveStore(connection, payloads),
            payloads=payloads,
        )
