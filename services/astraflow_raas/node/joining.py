"""Joining a run: from an address to everything a node needs to know.

Invariant: all figures about the run come from the recipe the server hands out; nothing is assumed before it
answered. Called by `server` at start; `worker` joins again by itself when a session broke.
"""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

from astraflow.client import AsyncClient, RetryPolicy
from astraflow.dataflow.v1 import run_pb2, run_service_pb2
from astraflow.errors import AstraflowError, InvalidArgumentError
from astraflow.recipe import Recipe
from astraflow.recipe.file import parse_recipe
from astraflow.rollout.v1 import task_pb2
from astraflow_kit.awaited_run import ONCE, AwaitedRun, NameInUse, suggesting_fixes
from astraflow_kit.log import get_logger
from astraflow_raas.node.folder import NodeFolder
from astraflow_raas.settings import NodeSettings

log = get_logger(__name__)

_ROLE = "rollout"
_NAME_LOOK_S = 2.0


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
    found: FoundRun, settings: NodeSettings, *, node_id: str, hardware: str
) -> run_service_pb2.JoinRunRequest:
    """Who the node will be in the run; at each reconnect as now, with the number that `join_run` was given."""
    num_tasks = settings.max_concurrent_tasks or found.recipe.raas.max_concurrent_tasks
    return run_service_pb2.JoinRunRequest(
        run_id=found.run.run_id,
        node_id=node_id,
        region=settings.region,
        pool=settings.pool,
        engines=[settings.engine if "://" not in settings.engine else "remote"],
        hardware=hardware,
        price_per_hour=settings.price_per_hour,
        # Tasks of one episode (evaluations) count here too; credits keep training tasks at their own bound.
        max_concurrent_tasks=num_tasks * found.recipe.dataflow.group_size,
    )


async def join_run(
    client: AsyncClient,
    request: run_service_pb2.JoinRunRequest,
    *,
    folder: NodeFolder,
    patience_s: float,
    name_patience_s: float,
) -> run_service_pb2.JoinRunResponse:
    """Register the node, as the one whose session the folder keeps, if any; `client` speaks as it from then on, and the
    number of `request` is the process's. Waits `name_patience_s` for a name in use.

    Raises InvalidArgumentError for a name that stays in use.
    """
    client.session = folder.kept_session(request.run_id)
    retry, started_s = replace(RetryPolicy(), total_s=patience_s), time.monotonic()
    while True:
        try:
            with suggesting_fixes(client.address, role=_ROLE):
                joined = await client.call(client.runs.JoinRun, request, retry=retry)
            break
        except NameInUse as error:
            waited_s = time.monotonic() - started_s
            if waited_s >= name_patience_s:
                raise InvalidArgumentError(f"{client.address}: {error.message}") from error
            log.info("node.waits", waiting_for="node_id", since_s=round(waited_s, 1), why=error.message)
        await asyncio.sleep(min(_NAME_LOOK_S, name_patience_s))
    client.session, request.incarnation = joined.session, joined.incarnation
    await asyncio.to_thread(folder.keep_session, request.run_id, joined.session)
    log.info("run.joined", run_id=request.run_id, node_id=request.node_id, versions=len(joined.versions))
    return joined
