"""A real trainer's log-probs in the archive: with the sample, and shown beside the engine's."""

import asyncio
from pathlib import Path

import numpy as np
import pytest

from astraflow.columns import decode_columns
from astraflow.dataflow.v1 import sample_service_pb2 as pb
from support import trainer_process as trainers
from support.cli import run
from support.dataflow_world import World
from support.trainer_process import TrainerProcess, forking, valkey

__all__ = ["forking", "valkey"]

pytestmark = [pytest.mark.slow]


async def test_a_sample_shows_trainer_and_engine(world: World, tmp_path: Path) -> None:
    overrides = ["dataflow.archive={write_every_s: 0.1, trainer_logprobs: true}"]
    await trainers.create_run(world, folder=tmp_path, steps=1, checkpoint_every_steps=1, overrides=overrides)
    trainer = TrainerProcess(world.address, tmp_path)
    async with trainers.recorded(world, trainer, steps=1):
        await trainer.lives()
    await world.until(lambda now: (now.archive.written, now.archive.waiting) == (4, 0))
    listed = (await world.ask(pb.ListSamplesResponse)).samples
    ids = [sample.sample_id for sample in listed]
    for content in (await world.ask(pb.GetSamplesResponse, sample_ids=ids)).samples:
        mask = decode_columns(content.trajectory).loss_mask
        found = np.frombuffer(content.trainer_logprobs, dtype="<f4")
        assert (np.isfinite(found) == mask).all()
        assert (found[mask] < 0).all()
    shown = await asyncio.to_thread(run, "samples", "show", ids[0], "--join", world.address)
    assert "by trainer's less engine's log-prob" in shown.output
    assert "trainer - engine" in shown.output
    as_json = await asyncio.to_thread(run, "samples", "show", ids[0], "--json", "--join", world.address)
    assert [value is not None for value in as_json.json["trainer_logprobs"]] == as_json.json["loss_mask"]
