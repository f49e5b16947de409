"""Joining a run: from an address to everything a node needs to know.

Invariant: all figures about the run come from the recipe the server hands out; nothing is assumed before it
answered. Called by `server` at start; `worker` joins again by itself when a session broke.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from astraflow.client import AsyncClient, RetryPolicy
from astraflow.dataflow.v1 import run_pb2, run_service_pb2
from astraflow.recipe import Recipe
from astraflow.recipe_file import parse_recipe
from astraflow_kit.log import get_logger
from astraflow_raas.lease import Sampling
from astraflow_raas.settings import NodeSettings
from astraflow_raas.worker import Membership, join_request

log = get_logger(__name__)


@dataclass(frozen=True, kw_only=True)
class FoundRun:
    """A run as the server describes it."""

    run: run_pb2.Run
    recipe: Recipe

    @property
    def sampling(self) -> Mapping[str, Sampling]:
        """The recipe's sampling parameters, per policy."""
        return {
            name: Sampling(
                temperature=policy.sampling.temperature,
                top_p=policy.sampling.top_p,
                top_k=policy.sampling.top_k,
                max_new_tokens=policy.sampling.max_new_tokens,
            )
            for name, policy in self.recipe.policies.items()
        }


async def find_run(client: AsyncClient, run_id: str, *, patience_s: float) -> FoundRun:
    """Ask the server for the run; waits up to `patience_s` for an unreachable server. Raises RecipeError."""
    log.info("server.asked_for_run", address=client.address, run_id=run_id, patience_s=patience_s)
    request = run_service_pb2.GetRunRequest(run_id=run_id)
    answer = await client.call(client.runs.GetRun, request, retry=RetryPolicy(total_s=patience_s))
    recipe = parse_recipe(answer.run.recipe_yaml, source=f"recipe of run {answer.run.run_id}").recipe
    return FoundRun(run=answer.run, recipe=recipe)


def membership_of(found: FoundRun, settings: NodeSettings, *, node_id: str, incarnation: int) -> Membership:
    """Who the node will be in the run."""
    kind = settings.engine if "://" not in settings.engine else "remote"
    return Membership(
        run_id=found.run.run_id,
        node_id=node_id,
        incarnation=incarnation,
        region=settings.region,
        pool=settings.pool,
        engines=(kind,),
        max_concurrent_tasks=settings.max_concurrent_tasks or found.recipe.raas.max_concurrent_tasks,
        group_size=found.recipe.dataflow.group_size,
    )


async def join_run(
    client: AsyncClient, membership: Membership, *, patience_s: float
) -> run_service_pb2.JoinRunResponse:
    """Register the node. Raises FencedError when a newer process uses its name."""
    retry = replace(RetryPolicy(), total_s=patience_s)
    joined = await client.call(client.runs.JoinRun, join_request(membership), retry=retry)
    log.info(
        "run.joined", run_id=membership.run_id, node_id=membership.node_id, versions=len(joined.versions)
    )
    return joined
