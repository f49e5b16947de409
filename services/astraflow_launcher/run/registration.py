"""Making the run known to the dataflow server: created the first time, continued after that.

Invariant: a run that is continued is the run it was: the recipe sent is the one it was created with, and only
the number of steps may grow. Called by `development_run` before any worker starts.
"""

from astraflow.client import AsyncClient
from astraflow.commands.run_creation import run_of
from astraflow.dataflow.v1 import admin_service_pb2, run_pb2, run_service_pb2
from astraflow.errors import NotFoundError
from astraflow.recipe.file import LoadedRecipe
from astraflow_kit.log import get_logger
from astraflow_launcher.run.folder import RunFolder
from astraflow_weights.errors import StateInDoubt

log = get_logger(__name__)

_TIMEOUT_S = 30.0


async def register_run(
    client: AsyncClient,
    *,
    folder: RunFolder,
    loaded: LoadedRecipe,
    store_uri: str | None,
    accept_data_loss: bool = False,
) -> None:
    """Create the run, or continue it when it ended before `loaded` wants.

    Raises what the server refuses, and StateInDoubt when its Redis is not the one that the folder's run was made in:
    nothing is created there then, unless the loss is accepted, or nothing was trained yet.
    """
    made = folder.record.identity
    if made and not accept_data_loss and await _is_forgotten(client, folder):
        log.warning("run.created_again", message="Redis forgot the run before anything was trained")
        made = ""
    run = run_of(loaded, run_id=folder.record.run_id, store_uri=store_uri or folder.store.as_uri())
    run.recipe_yaml, run.recipe_as_written = folder.recipe_yaml, folder.record.written
    request = run_service_pb2.CreateRunRequest(run=run)
    answer = await client.call(client.runs.CreateRun, request, timeout_s=_TIMEOUT_S)
    if not made:
        folder.remember(answer.run.identity)
    if answer.run.state not in (run_pb2.RUN_STATE_FINISHING, run_pb2.RUN_STATE_FINISHED):
        return
    policies = loaded.recipe.resolved_policies.values()
    wanted = {policy.policy_id: policy.steps for policy in policies if policy.train}
    finished = await _finished_steps(client, run.run_id)
    if any(finished.get(policy_id, 0) < steps for policy_id, steps in wanted.items()):
        again = run_service_pb2.UpdateRunRequest(run_id=run.run_id, state=run_pb2.RUN_STATE_ACTIVE)
        await client.call(client.runs.UpdateRun, again, timeout_s=_TIMEOUT_S)
        log.info("run.continued", finished_steps=finished, steps=wanted)


async def _is_forgotten(client: AsyncClient, folder: RunFolder) -> bool:
    """Whether the server does not know the folder's run and nothing was trained in it: Redis may be killed before its
    disk has what was created a second ago. Raises StateInDoubt where more is lost.
    """
    run_id = folder.record.run_id
    request = run_service_pb2.GetRunRequest(run_id=run_id)
    try:
        found = (await client.call(client.runs.GetRun, request, timeout_s=_TIMEOUT_S)).run.identity
    except NotFoundError:
        found = ""
    if found == folder.record.identity:
        return False
    if not (found or folder.has_trained()):
        return True
    has = f"has another run of that name, of identity {found}" if found else "has no such run"
    raise StateInDoubt(
        f"{folder.root} holds run {run_id!r} of identity {folder.record.identity}, with checkpoints up to step "
        f"{folder.checkpointed_step()}, but the dataflow server {has}: its Redis ({folder.redis}, or that of --redis) "
        "was lost or is another one. Nothing was deleted. Restore that Redis, or accept the loss with "
        "--accept-data-loss: training goes on from the newest checkpoint"
    )


async def _finished_steps(client: AsyncClient, run_id: str) -> dict[str, int]:
    """The last finished step of each policy."""
    request = admin_service_pb2.StatusRequest(run_id=run_id)
    status = await client.call(client.admin.Status, request, timeout_s=_TIMEOUT_S)
    return {policy.policy_id: policy.last_finished_step for policy in status.policies}
