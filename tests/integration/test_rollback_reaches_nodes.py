"""After `astraflow weights rollback` a node serves the old weights under the new number.

A real dataflow server over a real Valkey, a real node process with its CPU engine, real weights, the real command.
"""

import asyncio
from pathlib import Path

import httpx
import numpy as np
import pytest

from astraflow.dataflow.v1.batch_service_pb2 import BATCH_STAGE_TRAINED as TRAINED
from astraflow_weights.mirror.checkpoint import map_model
from astraflow_weights.store.file import FileStore
from support import engine_process, published_models, tiny_models, weight_fixtures
from support.dataflow_world import World
from support.node_process import WeightPublisher, announce, node_of, tiny_policy

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180), pytest.mark.usefixtures("quiet")]

RUN, POLICY = "run", "solver"


def greedy(url: str) -> tuple[str, list[int]]:
    """Version and tokens of a greedy generation by the engine that the node drives."""
    sampling = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}
    body = {"input_ids": [3, 1, 4, 1, 5, 9, 2, 6], "sampling_params": sampling, "return_logprob": True}
    meta = httpx.post(f"{url}/generate", json=body, timeout=30).json()["meta_info"]
    return meta["weight_version"], [entry[1] for entry in meta["output_token_logprobs"]]


async def test_a_node_follows_a_rollback_and_generates_as_the_old_version_did(
    world: World, tmp_path: Path
) -> None:
    checkpoint, store = tiny_policy(tmp_path / "policy"), tmp_path / "store"
    tiny_models.save_tiny_model(tmp_path / "other", shape=tiny_models.TinyShape(vocab_size=320), seed=5)
    await world.create_run(store_uri=store.as_uri(), dataset="Unevaluated", max_staleness=4)
    trainer, told = await world.trainer(publish_first=False), []
    weights = WeightPublisher.open(store, run_id=RUN, policy_id=POLICY, checkpoint=checkpoint)
    await announce(trainer, weights, step=0)
    with engine_process.running_engine(checkpoint, folder=tmp_path) as engine:
        async with node_of(world.address, tmp_path, "--engine", engine.url):
            await world.serves(0)
            told.append(await asyncio.to_thread(greedy, engine.url))
            for step in (1, 2):
                batch = (await trainer.acquire(step, base_version=step - 1, wait_s=30)).batch
                await trainer.ack(batch, TRAINED)
                if step == 1:
                    weights.model = {
                        name: np.array(array) for name, array in map_model(tmp_path / "other").items()
                    }
                await announce(trainer, weights, step=step)
            await world.serves(2)
            told.append(await asyncio.to_thread(greedy, engine.url))
            await trainer.release()
            ended = await weight_fixtures.ask_server(world, "rollback", "0")
            assert ended.status == 0, ended.errors
            await world.serves(3)
            told.append(await asyncio.to_thread(greedy, engine.url))
    versions, (first, second, third) = zip(*told, strict=True)
    assert versions == ("0", "2", "3")
    assert first == third != second, "the versions in between speak otherwise"
    log = published_models.read_log(FileStore(store), run_id=RUN)
    assert log.record(3).model_root == log.record(0).model_root
    await world.has_account()
