"""A client without an engine joins as a node, pushes demonstrations in token ids of its own, and `sft` learns them."""

from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from astraflow.columns import Columns, encode_columns
from astraflow.dataflow.v1 import task_service_pb2 as tasks
from astraflow.dataflow.v1 import trajectory_service_pb2 as pushes
from astraflow.errors import UnavailableError
from astraflow.rollout.v1 import task_pb2, trajectory_pb2
from astraflow_weights.mirror.mirror import Mirror
from astraflow_weights.store import open_store
from support import trainer_process as trainers
from support.dataflow_world import World, until
from support.published_models import read_log
from support.trainer_process import GROUPS_PER_STEP, POLICY, TrainerProcess, forking, valkey

__all__ = ["forking", "valkey"]

STEPS = 8
SFT = ("trainer.algorithm={preset: sft}", "dataflow.group_size=1")
SHOWN = (3, 1, 4, 1, 5, 9, 2, 6)
pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


def _demonstration(lease: task_pb2.Lease, version: int) -> trajectory_pb2.Episode:
    """Two tokens of a prompt, and what is to be learned after them."""
    mask, task_id = np.arange(len(SHOWN)) >= 2, lease.task.task_id
    columns = Columns(
        token_ids=np.asarray(SHOWN, dtype=np.int32),
        loss_mask=mask,
        logprobs=np.zeros(len(SHOWN), dtype=np.float32),
        version_spans=((2, len(SHOWN), version),),
    )
    body = encode_columns(columns, trajectory_id=f"shown-{task_id}")
    body.sampling.temperature = 1.0
    header = trajectory_pb2.TrajectoryHeader(
        trajectory_id=body.trajectory_id,
        policy_id=POLICY,
        num_tokens=len(SHOWN),
        num_trainable_tokens=int(mask.sum()),
        min_version=version,
        max_version=version,
        finish_reason="stop",
    )
    item = trajectory_pb2.TrajectoryItem(header=header, body=body.SerializeToString())
    return trajectory_pb2.Episode(
        run_id="run",
        task_id=task_id,
        attempt=lease.attempt,
        lease_id=lease.lease_id,
        episode_id=f"episode-{task_id}",
        status=trajectory_pb2.EPISODE_STATUS_FINISHED,
        trajectories=[item],
    )


def _said_by(store_uri: str, version: int, folder: Path) -> list[int]:
    """The likeliest tokens at each place that is trained, under a published version."""
    store = open_store(store_uri)
    model_dir = Mirror(folder).advance(store, read_log(store, POLICY, run_id="run"), target=version).directory
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([SHOWN])).logits[0]
    return [int(token) for token in logits[1:-1].argmax(-1)]


async def _push(world: World, count: int) -> None:
    """Submit a task for each demonstration, and push it under a lease of it and the version that is the newest."""

    async def has_a_version() -> bool:
        with suppress(UnavailableError):  # a busy machine's Redis may be silent for a while
            return (await world.status()).policies[0].HasField("version")
        return False

    await until(has_a_version, within_s=90)
    names = [f"task-{index}" for index in range(count)]
    await world.ask(tasks.SubmitTasksResponse, tasks=[task_pb2.Task(task_id=name) for name in names])
    author = await world.node("author")
    while count:
        for lease in await author.lease(count):
            version = (await world.status()).policies[0].version.version
            result = await author.push(_demonstration(lease, version))
            assert result.outcome == pushes.OUTCOME_ACCEPTED, result
            count -= 1


async def test_what_a_client_pushes_is_learned(world: World, tmp_path: Path) -> None:
    run = await trainers.create_run(world, folder=tmp_path, steps=STEPS, overrides=SFT)
    trainer = TrainerProcess(world.address, tmp_path)
    try:
        trainer.start()
        await _push(world, STEPS * GROUPS_PER_STEP)
        await trainer.exits_with(0)
    finally:
        trainer.kill()
    first, last = (_said_by(run.store_uri, version, tmp_path / f"v{version}") for version in (0, STEPS))
    assert last == [*SHOWN[2:]] != first
    await world.has_account(ingested=STEPS * GROUPS_PER_STEP, trained=STEPS * GROUPS_PER_STEP)
