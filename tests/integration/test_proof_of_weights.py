"""What a trainer publishes of its answers tells a wrong engine from one that rounds: numerically, and as a whole node.

The node is a process, its engine is real and loads a wrong folder when it is told to.
"""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from astraflow.columns import decode_columns
from astraflow.plugins import VersionSpan
from astraflow.rollout.v1.trajectory_pb2 import Episode, Trajectory
from astraflow_raas.engine.base import Arithmetic, Generation
from astraflow_raas.policies.canary import TOLERANCES, difference
from astraflow_weights.versions.probe import ProbeAnswer
from support.node_process import START_S, NodeProcess, WeightPublisher, node_of
from support.proven_versions import Published, probe_of
from support.scripted_dataflow import POLICY, RUN_ID, ScriptedDataflow, a_run, eventually, lease, running
from support.scripted_dataflow import RunningServer as Server
from support.tiny_models import TinyShape, load_reference, reference_logprobs, save_tiny_model
from support.wrong_loader import WrongLoader, wrong_loader

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]

SHAPE = TinyShape(vocab_size=320, num_layers=4)


# ---------------------------------------------------------------- arithmetic


class Tf32(TorchFunctionMode):
    """Rounds the factors of every product to ten bits, as the tensor cores of a GPU may do with float32."""

    _PRODUCTS = (
        torch.nn.functional.linear,
        torch.matmul,
        torch.Tensor.matmul,
        torch.nn.functional.scaled_dot_product_attention,
    )

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func in self._PRODUCTS:
            args = [_ten_bits(value) if isinstance(value, torch.Tensor) else value for value in args]
        return func(*args, **(kwargs or {}))


def _ten_bits(values: torch.Tensor) -> torch.Tensor:
    if values.dtype != torch.float32:
        return values
    return ((values.contiguous().view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


@torch.no_grad()
def greedy(model: PreTrainedModel, answer: ProbeAnswer) -> Generation:
    """What an engine that computes like this model answers."""
    ids, logprobs = list(answer.prompt_ids), list[float]()
    for _ in answer.token_ids:
        row = torch.log_softmax(model(input_ids=torch.tensor([ids])).logits[0, -1].float(), -1)
        ids.append(int(row.argmax()))
        logprobs.append(min(0.0, float(row[ids[-1]])))
    num_tokens = len(logprobs)
    return Generation(
        token_ids=tuple(ids[-num_tokens:]),
        logprobs=tuple(logprobs),
        spans=(VersionSpan(0, num_tokens, 0),),
        finish_reason="length",
    )


@pytest.mark.parametrize(
    ("arithmetic", "dtype", "rounding"),
    [
        pytest.param(Arithmetic.FLOAT32, torch.float32, nullcontext(), id="float32"),
        pytest.param(Arithmetic.FLOAT32, torch.float32, Tf32(), id="float32 by TF32 products"),
        pytest.param(Arithmetic.FLOAT32, torch.float64, nullcontext(), id="exacter than the trainer"),
        pytest.param(Arithmetic.HALF, torch.bfloat16, nullcontext(), id="bfloat16"),
    ],
)
def test_a_right_engine_of_other_arithmetic_is_believed_and_one_with_a_wrong_matrix_is_not(
    tmp_path: Path, arithmetic: Arithmetic, dtype: torch.dtype, rounding: AbstractContextManager[object]
) -> None:
    for seed in range(6):
        folder = save_tiny_model(tmp_path / f"{arithmetic}-{seed}", seed=seed, shape=SHAPE)
        probe = probe_of(load_reference(folder))
        engine = load_reference(folder).to(dtype)
        tolerance = TOLERANCES[arithmetic]
        with rounding:
            right = [difference(answer, greedy(engine, answer), tolerance=tolerance) for answer in probe]
            down = engine.model.layers[1].mlp.down_proj.weight
            down.data = down.data.flip(0)
            wrong = [difference(answer, greedy(engine, answer), tolerance=tolerance) for answer in probe]
        assert right == ["", ""], f"model {seed}"
        assert any(wrong), f"model {seed}"


# ---------------------------------------------------------------- a node


@pytest.fixture
def trainer(checkpoint: Path, tmp_path: Path) -> WeightPublisher:
    return WeightPublisher.open(tmp_path / "store", run_id=RUN_ID, policy_id=POLICY, checkpoint=checkpoint)


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Server]:
    async with running(ScriptedDataflow(run=a_run(store_uri=(tmp_path / "store").as_uri()))) as server:
        yield server


@pytest.fixture
async def door(shared_engine: str, tmp_path: Path) -> AsyncIterator[WrongLoader]:
    wrong = save_tiny_model(tmp_path / "wrong", seed=5, shape=TinyShape(vocab_size=320))
    async with wrong_loader(shared_engine, wrong=wrong) as door:
        yield door


@pytest.fixture
def published(trainer: WeightPublisher, checkpoint: Path) -> Published:
    return Published(trainer, checkpoint)


@pytest.fixture
async def node(
    server: Server, published: Published, door: WrongLoader, tmp_path: Path
) -> AsyncIterator[NodeProcess]:
    server.script.versions = [published.next()]
    async with node_of(server.address, tmp_path, "--engine", door.url) as node:
        await serves(server.script, 0)
        yield node


async def serves(script: ScriptedDataflow, version: int) -> None:
    def is_served() -> bool:
        return bool(script.credits) and dict(script.credits[-1].serving_versions) == {POLICY: version}

    await eventually(is_served, what=f"version {version} serves", patience_s=START_S)


async def sampled(script: ScriptedDataflow) -> Sequence[Episode]:
    script.send(lease=lease("after"))
    await eventually(lambda: len(script.pushes) >= 4, what="four episodes", patience_s=START_S)
    return script.pushes[-4:]


def assert_sampled_with(model: PreTrainedModel, episodes: Sequence[Episode], *, version: int) -> None:
    for episode in episodes:
        (item,) = episode.trajectories
        columns = decode_columns(Trajectory.FromString(item.body))
        assert {span[2] for span in columns.version_spans} == {version}
        first = int(columns.loss_mask.argmax())
        prompt, tokens = columns.token_ids[:first].tolist(), columns.token_ids[first:].tolist()
        expected = reference_logprobs(model, prompt, tokens)
        assert columns.logprobs[first:].tolist() == pytest.approx(expected, abs=1e-3)


async def test_an_engine_that_loaded_a_wrong_folder_is_given_the_right_one_before_anybody_samples(
    server: Server, published: Published, door: WrongLoader, node: NodeProcess
) -> None:
    door.num_wrong_loads = 1
    server.script.send(version=published.next())
    await serves(server.script, 1)
    (differs,) = node.events("engine.weights_differ")
    assert "does not answer as its weights do" in str(differs["message"])
    assert len(node.events("engine.weights_repaired")) == 1
    assert not node.events("engine.lost")
    assert_sampled_with(published.model, await sampled(server.script), version=1)
    assert not server.script.credits[-1].weight_faults


async def test_one_that_does_so_again_is_out_of_rotation_reported_and_replaced(
    server: Server, published: Published, door: WrongLoader, node: NodeProcess
) -> None:
    script = server.script
    # A repair does not help, nor does the next engine at once.
    door.num_wrong_loads = 3
    before = len(script.credits)
    script.send(version=published.next())
    await eventually(
        lambda: any(credit.weight_faults for credit in script.credits[before:]),
        what="the server is told",
        patience_s=START_S,
    )
    await serves(script, 1)
    await eventually(lambda: not script.credits[-1].weight_faults, what="the all-clear", patience_s=START_S)
    faulty = [credit for credit in script.credits[before:] if credit.weight_faults]
    assert {credit.weight_faults[0].version for credit in faulty} == {1}
    out = [credit for credit in faulty if not credit.serving_versions]
    assert out, "it went on serving"
    assert {credit.tasks for credit in out} == {0}, "it asked for work"
    assert len(node.events("engine.lost")) >= 1
    assert_sampled_with(published.model, await sampled(script), version=1)
