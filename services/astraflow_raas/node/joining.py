"""Joining a run: from an address to everything a node needs to know.

Invariant: all figures about the run come from the recipe the server hands out; nothing is assumed before it
answered. Called by `server` at start; `worker` joins again by itself when a session broke.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, replace

from astraflow.client import AsyncClient, RetryPolicy
from astraflow.dataflow.v1 import run_pb2, run_service_pb2
from astraflow.errors import AstraflowError, FencedError
from astraflow.recipe import Recipe
from astraflow.recipe.file import parse_recipe
from astraflow.rollout.v1 import task_pb2
from astraflow_kit.awaited_run import ONCE, AwaitedRun, suggesting_fixes
from astraflow_kit.log import get_logger
from astraflow_raas.settings import NodeSettings

log = get_logger(__name__)

_ROLE = "rollout"


@dataclass(frozen=True, kw_only=True)
class FoundRun:
    """A run as the server describes it."""

    run: run_pb2.Run
    recipe: Recipe

    @property
    def sampling(self) -> Mapping[str, task_pb2.SamplingParams]:
        """The recipe's sampling parameters, per policy."""
        return {
            name: task_pb2.SamplingParams(**policy.sampling.parameters())
            for name, policy in self.recipe.policies.items()
        }


async def find_run(client: AsyncClient, run_id: str, *, patience_s: float) -> FoundRun:
    """Ask the server for the run; waits up to `patience_s` for an unreachable server, and for a run that is not
    created yet.

    Raises UnavailableError when there was none, RecipeError, and what says that the node was started wrongly.
    """
    log.info("server.asked_for_run", address=client.address, run_id=run_id, patience_s=patience_s)
    run = await _first_answer(client, run_id, patience_s=patience_s)
    recipe = parse_recipe(run.recipe_yaml, source=f"recipe of run {run.run_id}").recipe
    return FoundRun(run=run, recipe=recipe)


async def _first_answer(client: AsyncClient, run_id: str, *, patience_s: float) -> run_pb2.Run:
    awaited = AwaitedRun(client.address, run_id, event="node.waits", role=_ROLE, patience_s=patience_s)
    request, timeout_s = run_service_pb2.GetRunRequest(run_id=run_id), awaited.answer_timeout_s
    while True:
        try:
            await client.server_info(timeout_s=timeout_s, retry=ONCE)
            return (await client.call(client.runs.GetRun, request, timeout_s=timeout_s, retry=ONCE)).run
        except AstraflowError as error:
            wait_s = awaited.wait_s_after(error)
        await asyncio.sleep(wait_s)


def join_request(
    found: FoundRun, settings: NodeSettings, *, node_id: str, incarnation: int, hardware: str
) -> run_service_pb2.JoinRunRequest:
    """Who the node will be in the run; the same at each reconnect."""
    num_tasks = settings.max_concurrent_tasks or found.recipe.raas.max_concurrent_tasks
    return run_service_pb2.JoinRunRequest(
        run_id=found.run.run_id,
        node_id=node_id,
        incarnation=incarnation,
        region=settings.region,
        pool=settings.pool,
        engines=[settings.engine if "://" not in settings.engine else "remote"],
        hardware=hardware,
        price_per_hour=settings.price_per_hour,
        # Tasks of one episode (evaluations) count here too; credits keep training tasks at their own bound.
        max_concurrent_tasks=num_tasks * found.recipe.dataflow.group_size,
    )


async def join_run(
    client: AsyncClient, request: run_service_pb2.JoinRunRequest, *, patience_s: float
) -> run_service_pb2.JoinRunResponse:
    """Register the node. Raises FencedError when a newer process uses its name."""
    retry = replace(RetryPolicy(), total_s=patience_s)
    try:
        with suggesting_fixes(client.address, role=_ROLE):
            joined = await client.call(client.runs.JoinRun, request, retry=retry)
    except FencedError as error:
        raise FencedError(f"{client.address}: {error.message}; choose another --node-id") from error
    log.info("run.joined", run_id=request.run_id, node_id=request.node_id, versions=len(joined.versions))
    return joined
