"""Changed elements, loaded into real SGLang by its own loader option: the weights of a whole load, bit for bit, and how
long each pauses.
"""

import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import median

import httpx
import numpy as np
import pytest
import structlog.testing
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from astraflow_raas.engine.base import Arithmetic, Generation, PauseMode
from astraflow_raas.engine.changed_elements import ChangedOrders
from astraflow_raas.engine.http import HttpEngine
from astraflow_raas.engine.process import EngineProcess
from astraflow_raas.policies.canary import WeightsDiffer, compare_answers
from astraflow_raas.policies.served_policy import ServedPolicy
from astraflow_trainer.model.model import PolicyModel
from astraflow_trainer.publish.probing import Prober
from astraflow_trainer.ranks.reductions import OneRank
from astraflow_weights.codec.tensors import Array, flat_unsigned
from astraflow_weights.mirror.changes import ChangedElements
from astraflow_weights.mirror.checkpoint import map_model, map_weights
from astraflow_weights.mirror.mirror import Mirror
from astraflow_weights.settings import MirrorSettings
from astraflow_weights.store.file import FileStore
from support.node_process import WeightPublisher, node_of
from support.proven_versions import Published
from support.published_models import RUN, read_log
from support.raas_parts import generate_call, write_tokenizer
from support.scripted_dataflow import RUN_ID, ScriptedDataflow, a_run, eventually, running
from support.sglang_server import (
    CPU_OPTIONS,
    SGLANG_PYTHON,
    START_DEADLINE_S,
    needs_sglang,
    report,
    started_sglang,
)
from support.tiny_models import TinyShape, load_reference, save_tiny_model, widened

pytestmark = [
    pytest.mark.ci,
    pytest.mark.integration,
    pytest.mark.usefixtures("on_cpu"),
    needs_sglang,
    pytest.mark.timeout(500),
]

POLICY = "solver"
SWAPS = 4


@asynccontextmanager
async def serving(
    folder: Path, model: Path, *options: str, orders: ChangedOrders | None = None
) -> AsyncIterator[EngineProcess]:
    orders = orders or ChangedOrders(folder / "orders")
    process = await started_sglang(folder, model, *options, orders=orders)
    try:
        await process.wait_healthy(timeout_s=START_DEADLINE_S)
        await process.engine.introduce()
        await process.engine.served_version()
        yield process
    finally:
        await process.end()


async def answers(engine: HttpEngine, name: str) -> list[tuple[tuple[int, ...], tuple[float, ...]]]:
    """Greedy tokens and log-probs, one call at a time so that nothing of the batch shows in them."""
    found: list[Generation] = []
    for number in range(4):
        prompt = tuple(3 + (7 * number + place) % 90 for place in range(12))
        call = generate_call(f"{name}-{number};", prompt_ids=prompt, max_new_tokens=16, temperature=0.0)
        found += await engine.generate([call])
    return [(each.token_ids, each.logprobs) for each in found]


def weights_in(engine: HttpEngine, name: str) -> list[object]:
    """A weight as SGLang says that it holds it, in the checkpoint's shape."""
    asked = {"name": name, "truncate_size": 10**6}
    url, headers = f"{engine.base_url}/get_weights_by_name", engine.headers
    answer = httpx.post(url, json=asked, headers=headers, timeout=30, trust_env=False)
    assert answer.status_code == 200, answer.text
    rows: list[object] = answer.json()
    return rows


@pytest.mark.parametrize(
    ("model_type", "dtype", "arithmetic"),
    [
        # In ci the node below loads changes of a qwen3, and proves that they are right.
        pytest.param("qwen3", "float32", Arithmetic.FLOAT32, id="qwen3", marks=pytest.mark.soak),
        pytest.param("llama", "bfloat16", Arithmetic.HALF, id="llama"),
    ],
)
async def test_changed_elements_make_the_weights_of_a_whole_load_and_others_are_told(
    tmp_path: Path, model_type: str, dtype: str, arithmetic: Arithmetic
) -> None:
    shape = TinyShape(model_type=model_type, tied=model_type == "qwen3", max_positions=1024, num_layers=4)
    first = write_tokenizer(save_tiny_model(tmp_path / "model", shape=shape))
    store = FileStore(tmp_path / "store")
    trainer = WeightPublisher.open(tmp_path / "store", run_id=RUN, policy_id=POLICY, checkpoint=first)
    mirror = Mirror(tmp_path / "mirror", settings=MirrorSettings(record_changes=True))
    trainer.publish()
    mirror.advance(store, read_log(store, POLICY), target=0)
    assert mirror.directory is not None
    policy = ServedPolicy(POLICY)
    async with serving(tmp_path, mirror.directory, f"--dtype={dtype}") as process:
        engine = process.engine
        assert engine.arithmetic is arithmetic
        for version in range(1, SWAPS + 1):
            trainer.publish()
            result = mirror.advance(store, read_log(store, POLICY), target=version)
            with structlog.testing.capture_logs() as logs:
                await engine.swap(model_dir=result.directory, version=version, changes=result.changes)
            (done,) = [line for line in logs if line["event"] == "engine.changes_loaded"]
            assert (done["traced"], done["whole"]) == (version == 1, 0)
            by_changes = await answers(engine, f"changes-{version}")
            reference = load_reference(result.directory)
            probe = Prober(PolicyModel(reference), ranks=OneRank()).answers()
            assert await compare_answers(engine, policy, version=version, probe=probe)
            if model_type == "llama":
                # The weights themselves; SGLang tells them of this family only.
                for name, bits in map_model(result.directory).items():
                    wanted = widened(bits)
                    # Rows and columns of padding end some of them.
                    found = torch.tensor(weights_in(engine, name))[tuple(map(slice, wanted.shape))]
                    assert torch.equal(found, wanted), name
        await engine.swap(model_dir=result.directory, version=SWAPS, running=PauseMode.ABORT)
        assert await answers(engine, "whole") == by_changes
        wrong = save_tiny_model(tmp_path / "wrong", seed=1, shape=shape)
        await engine.swap(model_dir=wrong, version=SWAPS + 1)
        with pytest.raises(WeightsDiffer):
            await compare_answers(engine, policy, version=SWAPS + 1, probe=probe)
    await policy.close()


async def test_whatever_stands_in_the_way_the_whole_model_is_loaded_and_the_reason_is_said(
    tmp_path: Path,
) -> None:
    one, other = (save_tiny_model(tmp_path / f"{seed}", seed=seed) for seed in (0, 1))
    async with serving(tmp_path, one) as process:
        engine = process.engine
        # They do not lead from what it serves: everything else of the other model is missing.
        changes = ChangedElements(
            base_version=0, version=1, positions={"model.norm.weight": np.arange(3, dtype=np.uint32)}
        )
        with structlog.testing.capture_logs() as logs:
            await engine.swap(model_dir=other, version=1, changes=changes)
        (said,) = [line["reason"] for line in logs if line["event"] == "engine.whole_loads"]
        assert "is kept in another form than in the checkpoint" in said
        by_fallback = await answers(engine, "fallback")
        await engine.swap(model_dir=other, version=2)
        assert await answers(engine, "whole") == by_fallback


LAYERS, HIDDEN, VOCAB = 8, 1024, 16_000
SHARES = (0.0, 0.0002, 0.002, 0.02)
"""Of the elements, that change; 0 for a whole load."""


@pytest.mark.soak
async def test_pause_per_gb_of_both(tmp_path: Path) -> None:
    config = AutoConfig.for_model(
        "qwen3",
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=3 * HIDDEN,
        head_dim=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=16,
        num_key_value_heads=8,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
    )
    model_dir = tmp_path / "model"
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(model_dir)
    bits = map_weights(model_dir / "model.safetensors", "r+")
    size_gb = sum(each.nbytes for each in bits.values()) / 1e9
    pauses: dict[str, list[float]] = {}
    orders = TimedOrders(tmp_path / "orders")
    async with serving(tmp_path, model_dir, "--dtype=bfloat16", orders=orders) as process:
        for version in range(1, 1 + 5 * len(SHARES)):
            share, orders.seconds = SHARES[version % len(SHARES)], 0.0
            changes = change(bits, share, version=version) if share else None
            began_s = time.monotonic()
            with structlog.testing.capture_logs() as logs:
                await process.engine.swap(model_dir=model_dir, version=version, changes=changes)
            pause_s = time.monotonic() - began_s - orders.seconds
            loaded = [line for line in logs if line["event"] == "engine.changes_loaded"]
            assert bool(loaded) == bool(share)
            kind = "first" if loaded and loaded[0]["traced"] else f"{share:.2%}" if share else "whole"
            pauses.setdefault(kind, []).append(pause_s / size_gb)
            if loaded:
                pauses.setdefault(f"{kind}, the loader alone", []).append(loaded[0]["seconds"] / size_gb)
    report(
        size_gb=round(size_gb, 3),
        seconds_per_gb={
            kind: {"n": len(all_of), "least": round(min(all_of), 3), "median": round(median(all_of), 3)}
            for kind, all_of in pauses.items()
        },
    )


class TimedOrders(ChangedOrders):
    """Orders are written before the pause."""

    seconds = 0.0

    def write(self, changes: ChangedElements, *, model_dir: Path) -> None:
        began_s = time.monotonic()
        super().write(changes, model_dir=model_dir)
        self.seconds = time.monotonic() - began_s


def change(bits: Mapping[str, Array], share: float, *, version: int) -> ChangedElements:
    """Another version in the same file."""
    draw, positions = np.random.default_rng(version), {}
    for name, each in bits.items():
        count = max(1, int(each.size * share))
        positions[name] = np.unique(draw.integers(0, each.size, count)).astype(np.uint32)
        flat_unsigned(each)[positions[name]] ^= np.uint16(1)
    return ChangedElements(base_version=version - 1, version=version, positions=positions)


async def test_a_node_loads_changed_elements_when_its_setting_says_so_and_proves_each_version(
    checkpoint: Path, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    trainer = WeightPublisher.open(store, run_id=RUN_ID, policy_id=POLICY, checkpoint=checkpoint)
    published = Published(trainer, checkpoint)
    options = ["--engine", "sglang", "--engine-python", str(SGLANG_PYTHON), "--engine-update", "changed"]
    options += [f"--engine-arg={option}" for option in (*CPU_OPTIONS, "--max-running-requests=9")]
    async with running(ScriptedDataflow(run=a_run(store_uri=store.as_uri()))) as server:
        script = server.script
        script.versions = [published.next()]
        async with node_of(server.address, tmp_path, *options) as node:
            for version in range(3):
                if version:
                    script.send(version=published.next())
                await eventually(
                    lambda now=version: (
                        script.credits and script.credits[-1].serving_versions.get(POLICY) == now
                    ),
                    what=f"version {version} serves",
                    patience_s=START_DEADLINE_S,
                )
            assert [line["version"] for line in node.events("engine.changes_loaded")] == [1, 2]
            for unwanted in ("engine.whole_loads", "engine.weights_differ", "engine.canary_unanswered"):
                assert not node.events(unwanted)
