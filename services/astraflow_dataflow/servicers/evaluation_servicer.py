"""EvaluationService: what evaluations on held-out tasks found, down to each sample."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from astraflow.dataflow.v1 import evaluation_service_pb2 as pb
from astraflow.dataflow.v1 import evaluation_service_pb2_grpc
from astraflow.errors import NotFoundError
from astraflow_dataflow.records import StoredEvaluation
from astraflow_dataflow.rules.scores import read_journal, scores_of
from astraflow_dataflow.runs.registry import RunRegistry
from astraflow_dataflow.servicers.defaults import page_size
from astraflow_dataflow.status.reporting import evaluation_messages
from astraflow_dataflow.store.store import Store
from astraflow_kit.serve import Context


@dataclass(frozen=True)
class EvaluationServicer(evaluation_service_pb2_grpc.EvaluationServiceServicer):
    """Serves EvaluationService."""

    store: Store
    registry: RunRegistry

    async def GetEvaluation(
        self, request: pb.GetEvaluationRequest, context: Context
    ) -> pb.GetEvaluationResponse:
        run = await self.registry.get(request.run_id)
        first, size = int(request.page_token or 0), page_size(request)
        found = await self._find(run.run_id, request.evaluation_id)
        journal = await self.store.evaluations.journal(run.run_id, found.evaluation_id)
        # A journal has up to a million lines.
        tasks = await asyncio.to_thread(read_journal, journal, samples_per_task=found.samples_per_task)
        scores = await asyncio.to_thread(
            scores_of,
            tasks,
            policies=found.versions,
            samples_per_task=found.samples_per_task,
            pass_reward=run.recipe.dataflow.evaluation.pass_reward,
        )
        following = first + size
        return pb.GetEvaluationResponse(
            evaluations=evaluation_messages(found),
            scores=scores,
            tasks=tasks[first:following],
            next_page_token=str(following) if following < len(tasks) else "",
        )

    async def _find(self, run_id: str, evaluation_id: str) -> StoredEvaluation:
        """The evaluation, or the newest one. Raises NotFoundError."""
        known = await self.store.evaluations.all(run_id)
        for item in reversed(known):
            if evaluation_id in ("", item.evaluation_id):
                return item
        ids = ", ".join(item.evaluation_id for item in known[-5:]) or "none yet"
        wanted = f"evaluation {evaluation_id!r}" if evaluation_id else "evaluation"
        raise NotFoundError(f"run {run_id!r} has no {wanted}; its newest are: {ids}")
