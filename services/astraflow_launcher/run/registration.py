"""Making the run known to the dataflow server: created the first time, continued after that.

Invariant: a run that is continued is the run it was: the recipe sent is the one it was created with, and only
the number of steps may grow. Called by `development_run` before any worker starts.
"""

from __future__ import annotations

from astraflow.client import AsyncClient
from astraflow.commands.run_creation import run_of
from astraflow.dataflow.v1 import admin_service_pb2, run_pb2, run_service_pb2
from astraflow.recipe.file import LoadedRecipe
from astraflow_kit.log import get_logger
from astraflow_launcher.run.folder import RunFolder

log = get_logger(__name__)

__all__ = ["register_run"]

_TIMEOUT_S = 30.0


async def register_run(
    client: AsyncClient, *, folder: RunFolder, loaded: LoadedRecipe, store_uri: str | None
) -> None:
    """Create the run, or continue it when it ended before `loaded` wants. Raises what the server refuses."""
    run = run_of(
        loaded,
        run_id=folder.record.run_id,
        store_uri=store_uri or folder.store.as_uri(),
        recipe_yaml=folder.recipe_yaml,
    )
    request = run_service_pb2.CreateRunRequest(run=run)
    answer = await client.call(client.runs.CreateRun, request, timeout_s=_TIMEOUT_S)
    if answer.run.state not in (run_pb2.RUN_STATE_FINISHING, run_pb2.RUN_STATE_FINISHED):
        return
    policies = loaded.recipe.resolved_policies.values()
    wanted = {policy.policy_id: policy.steps for policy in policies if policy.train}
    finished = await _finished_steps(client, run.run_id)
    if any(finished.get(policy_id, 0) < steps for policy_id, steps in wanted.items()):
        again = run_service_pb2.UpdateRunRequest(run_id=run.run_id, state=run_pb2.RUN_STATE_ACTIVE)
        await client.call(client.runs.UpdateRun, again, timeout_s=_TIMEOUT_S)
        log.info("run.continued", finished_steps=finished, steps=wanted)


async def _finished_steps(client: AsyncClient, run_id: str) -> dict[str, int]:
    """The last finished step of each policy."""
    request = admin_service_pb2.StatusRequest(run_id=run_id)
    status = await client.call(client.admin.Status, request, timeout_s=_TIMEOUT_S)
    return {policy.policy_id: policy.last_finished_step for policy in status.policies}
