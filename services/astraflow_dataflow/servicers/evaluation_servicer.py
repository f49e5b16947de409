"""EvaluationService: evaluations that are asked for, and what all of them found, down to each sample."""

import asyncio
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from astraflow.dataflow.v1 import evaluation_service_pb2 as pb
from astraflow.dataflow.v1 import evaluation_service_pb2_grpc
from astraflow.errors import InvalidArgumentError, NotFoundError, PreconditionError
from astraflow.recipe import MAX_EVALUATION_SAMPLES
from astraflow.rollout.v1.task_pb2 import Task
from astraflow_dataflow.records import StoredEvaluation, timestamp
from astraflow_dataflow.rules.scores import read_journal, scores_of
from astraflow_dataflow.rules.tasks import task_problem
from astraflow_dataflow.runs.registry import RunContext, RunRegistry
from astraflow_dataflow.servicers.defaults import page_size
from astraflow_dataflow.status.reporting import evaluation_messages
from astraflow_dataflow.store.durability import Durability
from astraflow_dataflow.store.keys import TRAIN_LANE
from astraflow_dataflow.store.store import Store
from astraflow_kit.serve import Context


@dataclass(frozen=True)
class EvaluationServicer(evaluation_service_pb2_grpc.EvaluationServiceServicer):
    """Serves EvaluationService."""

    store: Store
    registry: RunRegistry
    durability: Durability

    async def RequestEvaluation(
        self, request: pb.RequestEvaluationRequest, context: Context
    ) -> pb.RequestEvaluationResponse:
        run = await self.registry.get(request.run_id)
        settings = run.recipe.dataflow.evaluation
        request.run_id = run.run_id
        digest = hashlib.sha256(request.SerializeToString(deterministic=True)).hexdigest()
        _require_sane(request, run)
        # Beside the event loop, which a thousand tasks with all the data they may have would hold up.
        tasks = await asyncio.to_thread(_own_tasks, request.tasks)
        each = request.samples_per_task or settings.samples_per_task
        planned = each * (len(tasks) or request.num_tasks or settings.num_samples)
        if planned > MAX_EVALUATION_SAMPLES:
            raise InvalidArgumentError(
                f"{planned:,} samples (tasks · samples_per_task), at most {MAX_EVALUATION_SAMPLES:,}; "
                "lower one of them"
            )
        await self.store.evaluations.request(
            run.run_id,
            request.evaluation_id,
            digest=digest,
            versions=request.versions,
            planned=planned,
            samples_per_task=each,
            tasks=tasks,
        )
        await self.durability.barrier(run.run_id)
        found = await self._find(run.run_id, request.evaluation_id)
        return pb.RequestEvaluationResponse(evaluation=_pass_message(found))

    async def ListEvaluations(
        self, request: pb.ListEvaluationsRequest, context: Context
    ) -> pb.ListEvaluationsResponse:
        run = await self.registry.get(request.run_id)
        known = (await self.store.evaluations.all(run.run_id))[::-1]
        first = int(request.page_token or 0)
        following = first + page_size(request)
        return pb.ListEvaluationsResponse(
            evaluations=map(_pass_message, known[first:following]),
            next_page_token=str(following) if following < len(known) else "",
        )

    async def CancelEvaluation(
        self, request: pb.CancelEvaluationRequest, context: Context
    ) -> pb.CancelEvaluationResponse:
        run = await self.registry.get(request.run_id)
        if not request.evaluation_id:
            raise InvalidArgumentError("name the evaluation to cancel; ListEvaluations shows those there are")
        found = await self._find(run.run_id, request.evaluation_id)
        if not found.requested:
            raise PreconditionError(
                f"evaluation {found.evaluation_id} is the recipe's, and only those on request are cancelled; "
                "dataflow.evaluation of the recipe says when there is one"
            )
        await self.store.evaluations.give_up(
            run.run_id, found.evaluation_id, reason="cancelled", state="cancelled"
        )
        await self.durability.barrier(run.run_id)
        ended = await self._find(run.run_id, found.evaluation_id)
        return pb.CancelEvaluationResponse(evaluation=_pass_message(ended))

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
            evaluation=_pass_message(found),
            scores=scores,
            tasks=tasks[first:following],
            next_page_token=str(following) if following < len(tasks) else "",
        )

    async def _find(self, run_id: str, evaluation_id: str) -> StoredEvaluation:
        """The evaluation, or the newest one that has begun. Raises NotFoundError."""
        known = await self.store.evaluations.all(run_id)
        for item in reversed(known):
            if item.evaluation_id == evaluation_id or (not evaluation_id and item.state != "waiting"):
                return item
        ids = ", ".join(item.evaluation_id for item in known[-5:]) or "none yet"
        wanted = f"evaluation {evaluation_id!r}" if evaluation_id else "evaluation"
        raise NotFoundError(f"run {run_id!r} has no {wanted}; its newest are: {ids}")


def _require_sane(request: pb.RequestEvaluationRequest, run: RunContext) -> None:
    """Raises InvalidArgumentError for what contradicts itself, PreconditionError for a run without trained policies."""
    if request.evaluation_id == TRAIN_LANE:
        raise InvalidArgumentError(f"an evaluation cannot be called {TRAIN_LANE!r}; give it another name")
    if request.tasks and request.num_tasks:
        raise InvalidArgumentError(
            "`tasks` and `num_tasks` exclude each other: own tasks, or that many held-out ones"
        )
    if not run.trained_policies:
        raise PreconditionError("the run trains no policy, and an evaluation is of those that are trained")
    unknown = sorted(set(request.versions) - set(run.trained_policies))
    if unknown:
        raise InvalidArgumentError(
            f"the run trains no policy {unknown[0]!r}; it trains: {', '.join(run.trained_policies)}"
        )


def _own_tasks(tasks: Sequence[Task]) -> list[bytes]:
    """Tasks of a request as they are stored. Raises InvalidArgumentError for the first that breaks a bound."""
    names: set[str] = set()
    for task in tasks:
        problem = task_problem(task, allow_evaluation=True)
        if problem or task.task_id in names:
            raise InvalidArgumentError(
                problem or f"task {task.task_id} comes twice; give each an id of its own"
            )
        names.add(task.task_id)
    return [task.SerializeToString() for task in tasks]


def _pass_message(item: StoredEvaluation) -> pb.EvaluationPass:
    message = pb.EvaluationPass(
        evaluation_id=item.evaluation_id,
        state=pb.EvaluationState.Value(f"EVALUATION_STATE_{item.state.upper()}"),
        versions=item.versions,
        samples_per_task=item.samples_per_task,
        num_planned=item.planned,
        num_done=item.done,
        num_failed=item.failed,
        requested=item.requested,
        has_own_tasks=item.has_own_tasks,
        final=item.final,
        reason=item.reason,
        create_time=timestamp(item.create_ms),
        policies=evaluation_messages(item),
    )
    if item.complete_ms:
        message.complete_time.CopyFrom(timestamp(item.complete_ms))
    return message
