"""Joining a run: from an address to everything a node needs to know.

Invariant: all figures about the run come from the recipe the server hands out; nothing is assumed before it
answered. Called by `server` at start; `worker` joins again by itself when a session broke.
"""

import asyncio
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

from astraflow.client import DEFAULT_TIMEOUT_S, AsyncClient, RetryPolicy
from astraflow.dataflow.v1 import run_pb2, run_service_pb2
from astraflow.errors import (
    AstraflowError,
    FencedError,
    InvalidArgumentError,
    NotFoundError,
    PermissionError_,
    PreconditionError,
    RetryableError,
    UnauthenticatedError,
    UnavailableError,
    UnimplementedError,
)
from astraflow.recipe import Recipe
from astraflow.recipe.file import parse_recipe
from astraflow.rollout.v1 import task_pb2
from astraflow_kit.log import get_logger
from astraflow_raas.settings import NodeSettings

log = get_logger(__name__)

_RETRY = RetryPolicy(first_wait_s=0.1, max_wait_s=1.0)
_LOG_EVERY_S = 10.0


@dataclass(frozen=True, kw_only=True)
class FoundRun:
    """A run as the server describes it."""

    run: run_pb2.Run
    recipe: Recipe

    @property
    def sampling(self) -> Mapping[str, task_pb2.SamplingParams]:
        """The recipe's sampling parameters, per policy."""
        return {
            name: task_pb2.SamplingParams(**policy.sampling.model_dump())
            for name, policy in self.recipe.policies.items()
        }


class _NoRunYet(RetryableError):
    """The server is there, and nobody has created a run on it."""

    reason, code = "NO_RUN", "NOT_FOUND"


async def find_run(client: AsyncClient, run_id: str, *, patience_s: float) -> FoundRun:
    """Ask the server for the run; waits up to `patience_s` for an unreachable server, or for its first run.

    Raises UnavailableError when it did not answer, RecipeError, and what says that the node was started wrongly.
    """
    log.info("server.asked_for_run", address=client.address, run_id=run_id, patience_s=patience_s)
    run = await _first_answer(client, run_id, patience_s=patience_s)
    recipe = parse_recipe(run.recipe_yaml, source=f"recipe of run {run.run_id}").recipe
    return FoundRun(run=run, recipe=recipe)


async def _first_answer(client: AsyncClient, run_id: str, *, patience_s: float) -> run_pb2.Run:
    loop = asyncio.get_running_loop()
    started_s, logged_s, failures = loop.time(), -math.inf, 0
    while True:
        try:
            return await _ask(client, run_id, timeout_s=min(DEFAULT_TIMEOUT_S, patience_s))
        except RetryableError as error:
            reason = "run" if isinstance(error, _NoRunYet) else "server"
            failures += 1
            wait_s, waited_s = _RETRY.wait_s(failures), loop.time() - started_s
            if waited_s + wait_s > patience_s:
                raise UnavailableError(_gave_up(client, error, reason=reason, waited_s=waited_s)) from error
            if loop.time() - logged_s >= _LOG_EVERY_S:
                logged_s = loop.time()
                log.info("node.waits", waiting_for=reason, since_s=round(waited_s, 1), why=error.message)
        await asyncio.sleep(wait_s)


async def _ask(client: AsyncClient, run_id: str, *, timeout_s: float) -> run_pb2.Run:
    request, once = run_service_pb2.GetRunRequest(run_id=run_id), RetryPolicy(total_s=0)
    with _suggesting_fixes(client):
        await client.server_info(timeout_s=timeout_s, retry=once)
        try:
            answer = await client.call(client.runs.GetRun, request, timeout_s=timeout_s, retry=once)
        except NotFoundError as error:
            if run_id:
                raise
            raise _NoRunYet(error.message) from error
    return answer.run


@contextmanager
def _suggesting_fixes(client: AsyncClient) -> Iterator[None]:
    """Say which option of the node to change after a refusal."""
    try:
        yield
    except NotFoundError as error:
        raise NotFoundError(f"{client.address}: {error.message}; check --run-id and --join") from error
    except PreconditionError as error:
        raise InvalidArgumentError(f"{client.address}: {error.message}; give --run-id") from error
    except (UnauthenticatedError, PermissionError_) as error:
        raise type(error)(
            f"{client.address}: {error.message}; give --token-file, or --join-file, with a token of the role "
            "`rollout` for this run"
        ) from error
    except FencedError as error:
        raise FencedError(f"{client.address}: {error.message}; choose another --node-id") from error
    except UnimplementedError as error:
        raise UnimplementedError(
            f"{client.address} is no dataflow server: {error.message}; check --join"
        ) from error


def _gave_up(client: AsyncClient, error: AstraflowError, *, reason: str, waited_s: float) -> str:
    what = "has no run" if reason == "run" else "did not answer"
    return (
        f"the dataflow server at {client.address} {what} within {waited_s:.1f} s: {error.message}; start it, check "
        "--join, or raise --join-timeout-s"
    )


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
    with _suggesting_fixes(client):
        retry = replace(RetryPolicy(), total_s=patience_s)
        joined = await client.call(client.runs.JoinRun, request, retry=retry)
    log.info("run.joined", run_id=request.run_id, node_id=request.node_id, versions=len(joined.versions))
    return joined
