"""One ingest per run and process, started on first use. Called by the trajectory service."""

from __future__ import annotations

from dataclasses import dataclass, field

from astraflow_dataflow.episodes.ingest import Ingest
from astraflow_dataflow.episodes.settling import Settling
from astraflow_dataflow.runs import background
from astraflow_dataflow.runs.registry import RunRegistry
from astraflow_dataflow.store.durability import Durability
from astraflow_dataflow.store.store import Store
from astraflow_kit.metrics import Metrics


@dataclass
class Ingests:
    """The ingests of this process."""

    store: Store
    registry: RunRegistry
    settling: Settling
    metrics: Metrics
    durability: Durability
    _by_run: dict[str, Ingest] = field(default_factory=dict)

    async def get(self, run_id: str) -> Ingest:
        """Return a run's ingest. Raises NotFoundError."""
        context = await self.registry.get(run_id)
        ingest = self._by_run.get(context.run_id)
        if ingest is None or ingest.context is not context:
            ingest = Ingest(
                context,
                store=self.store,
                registry=self.registry,
                settling=self.settling,
                metrics=self.metrics,
                durability=self.durability,
            )
            self._by_run[context.run_id] = ingest
            context.tasks.append(background.start(ingest.run, name="ingest", run_id=context.run_id))
        return ingest
