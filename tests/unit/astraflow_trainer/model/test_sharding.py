"""How a model lies on its ranks' devices changes what it costs, not what it learns."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import structlog
import torch
import torch._dynamo
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import TorchDispatchMode

from astraflow.errors import InvalidArgumentError
from astraflow.recipe import LoraSettings, OptimizerSettings
from astraflow_trainer.batches.packing import pack
from astraflow_trainer.model import sharding
from astraflow_trainer.model.lora import adapted
from astraflow_trainer.model.model import PolicyModel, build_causal_lm, local_part
from astraflow_trainer.model.optimizer import MasterOptimizer
from astraflow_trainer.model.sharding import Placement, Recompute, shard
from astraflow_trainer.publish.published import HeldPart
from astraflow_trainer.step.step import StepMetrics, StepSettings, train_step
from support.tiny_training import TINY, MakePolicy, copies, make_rows, same_bits

BF16 = Placement(compute="bf16")


def _kept_bytes(policy: PolicyModel) -> int:
    """What autograd keeps between a forward and a backward pass, apart from parameters."""
    (batch, *_) = pack(make_rows(), token_budget=256)
    own = {local_part(parameter).data_ptr() for parameter in policy.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.data_ptr() not in own:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        scores = policy.score(batch)
    scores.logprob_N.sum().backward()
    return sum(kept.values())


def _gradient(policy: PolicyModel) -> dict[str, torch.Tensor]:
    for batch in pack(make_rows(), token_budget=64):
        policy.score(batch).logprob_N.sum().backward()
    return {
        name: local_part(parameter.grad).detach().clone()
        for name, parameter in policy.hf_parameters()
        if parameter.grad is not None
    }


@pytest.mark.parametrize("recompute", ["selective", "full"])
@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_recomputing_changes_no_bit_of_a_gradient(
    make_policy: MakePolicy, recompute: Recompute, compute: Any
) -> None:
    plain = _gradient(make_policy(placement=Placement(compute=compute)))
    again = make_policy(placement=Placement(compute=compute, recompute=recompute)).train()
    assert same_bits(plain, _gradient(again))


def test_recomputing_keeps_less(make_policy: MakePolicy) -> None:
    none, full = (
        _kept_bytes(make_policy(placement=Placement(recompute=recompute)).train())
        for recompute in ("none", "full")
    )
    assert full < 0.5 * none


def test_a_selective_layer_does_no_product_twice(make_policy: MakePolicy) -> None:
    none, selective, full = (
        _num_products(make_policy(placement=Placement(recompute=recompute)).train())
        for recompute in ("none", "selective", "full")
    )
    assert none == selective < full


class _Products(TorchDispatchMode):
    """Counts matrix products."""

    num_products = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num_products += str(func) in ("aten.mm.default", "aten.addmm.default")
        return func(*args, **(kwargs or {}))


def _num_products(policy: PolicyModel) -> int:
    (batch, *_) = pack(make_rows(), token_budget=256)
    with _Products() as counted:
        policy.score(batch).logprob_N.sum().backward()
    return counted.num_products


def test_bf16_compute_reads_the_published_bits_and_keeps_16_bytes_of_state(make_policy: MakePolicy) -> None:
    policy = make_policy(placement=BF16, vocab_size=64, hidden_size=64)
    optimizer = MasterOptimizer(policy, settings=OptimizerSettings(warmup_steps=0, learning_rate=1e-3))
    settings = StepSettings(tokens_per_microbatch=64)
    train_step(policy, optimizer=optimizer, rows=make_rows(), settings=settings)
    num_elements = sum(parameter.numel() for _, parameter in policy.hf_parameters())
    (batch, *_) = pack(make_rows(), token_budget=256)
    policy.score(batch).logprob_N.sum().backward()
    held = {
        local_part(tensor).untyped_storage().data_ptr(): local_part(tensor).untyped_storage().nbytes()
        for tensor in (
            *policy.parameters(),
            *(parameter.grad for parameter in policy.parameters() if parameter.grad is not None),
            *optimizer.state().values(),
        )
    }
    assert sum(held.values()) / num_elements <= 16.0
    published = HeldPart(policy)
    flat = torch.empty(published.num_elements, dtype=torch.bfloat16)
    published.copy_to(flat)
    bits, at = {}, 0
    for name, item in published.tensors.items():
        bits[name] = flat[at : at + item.count]
        at += item.count
    read = _gathered(policy)
    assert read.keys() == bits.keys()
    assert all(torch.equal(read[name].view(-1), bits[name]) for name in bits)


def _gathered(policy: PolicyModel) -> dict[str, torch.Tensor]:
    """What the forward pass reads."""
    for module in policy.modules():
        if hasattr(module, "unshard"):
            module.unshard()
    return {name: parameter.detach().clone() for name, parameter in policy.hf_parameters()}


def test_bf16_compute_agrees_with_fp32(make_policy: MakePolicy) -> None:
    precise, rounded = make_policy(), make_policy(placement=BF16)
    for name, parameter in precise.hf_parameters():
        local_part(parameter).data.copy_(local_part(dict(rounded.hf_parameters())[name]).bfloat16())
    for batch in pack(make_rows(), token_budget=64):
        one, other = precise.score(batch), rounded.score(batch)
        assert other.logprob_N.dtype == torch.float32
        # 8 bits of every product; the log-probs are around -3.5.
        assert float((other.logprob_N - one.logprob_N).detach().abs().mean()) < 0.05
    gradients = _gradient(precise), _gradient(rounded)
    for name, gradient in gradients[0].items():
        assert gradients[1][name].dtype == torch.float32
        cosine = torch.cosine_similarity(gradient.view(-1), gradients[1][name].view(-1), dim=0)
        assert float(cosine) > 0.99, name


def test_frozen_parameters_are_kept_in_bf16_beside_an_adapter_s_masters(mesh: DeviceMesh) -> None:
    lora = LoraSettings(of="base", rank=2, alpha=4)
    policy = PolicyModel(adapted(build_causal_lm(TINY, seed=0), lora, seed=0))
    shard(policy, mesh=mesh, placement=BF16)
    before = copies(policy.named_parameters())
    optimizer = MasterOptimizer(policy, settings=OptimizerSettings(warmup_steps=0))
    train_step(policy, optimizer=optimizer, rows=make_rows(), settings=StepSettings(tokens_per_microbatch=64))
    for name, values in copies(policy.named_parameters()).items():
        trained = "lora_" in name
        assert values.dtype == (torch.float32 if trained else torch.bfloat16), name
        assert torch.equal(values, before[name]) != ("lora_B" in name), name


def test_an_embedding_of_its_own_is_not_gathered_beside_the_layers(make_policy: MakePolicy) -> None:
    policy = make_policy(tie_word_embeddings=False)
    embedding = policy.causal_lm.get_input_embeddings()
    assert hasattr(embedding, "unshard")
    seen = []
    policy.causal_lm.get_decoder().norm.register_forward_pre_hook(
        lambda *_: seen.append(type(embedding.weight))
    )
    policy.score(pack(make_rows(), token_budget=256)[0])
    assert seen == [
        type(
            dict(make_policy(tie_word_embeddings=False).named_parameters())[
                "causal_lm.model.embed_tokens.weight"
            ]
        )
    ]


def test_offload_without_a_gpu_is_refused(make_policy: MakePolicy) -> None:
    with pytest.raises(
        InvalidArgumentError, match="ASTRAFLOW_OFFLOAD is true, and this rank computes on the CPU"
    ):
        make_policy(placement=Placement(offload=True))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
@pytest.mark.parametrize(
    "recompute", [*(pytest.param(how, marks=pytest.mark.soak) for how in ("none", "selective")), "full"]
)
def test_a_compiled_layer_computes_the_same(
    make_policy: MakePolicy, recompute: Recompute, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The graph that a compiler is given, computed as it is; with what it is told to compute again."""
    monkeypatch.setattr(sharding, "_BACKEND", "aot_eager")
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = make_policy(placement=Placement(compiled=True, recompute=recompute)).train()
    assert same_bits(_gradient(make_policy()), _gradient(compiled))
    counted = torch._dynamo.utils.counters
    assert counted["stats"]["unique_graphs"] <= 4, (
        "one graph under a mask, one without, for all layers and sizes; two for the logits of a chunk"
    )
    assert not counted["graph_break"]
    if recompute == "full":
        assert _kept_bytes(compiled) < 0.5 * _kept_bytes(make_policy().train())


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
def test_compiled_code_computes_the_same_within_rounding(make_policy: MakePolicy) -> None:
    if lacks := sharding._lacks_to_compile("cpu"):
        pytest.skip(f"compiled layers were not compared with plain ones: this machine lacks {lacks}")
    torch._dynamo.reset()
    plain, compiled = make_policy(), make_policy(placement=Placement(compiled=True))
    expected, found = _gradient(plain), _gradient(compiled)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, atol=1e-5, rtol=1e-3)
    one, other = (_step(policy) for policy in (plain, compiled))
    assert one.loss is not None
    assert other.loss is not None
    assert asdict(other.loss) == pytest.approx(asdict(one.loss), rel=1e-4, abs=1e-5)
    assert other.gradient_norm == pytest.approx(one.gradient_norm, rel=1e-4)


def _step(policy: PolicyModel) -> StepMetrics:
    policy.zero_grad(set_to_none=True)
    optimizer = MasterOptimizer(policy, settings=OptimizerSettings(warmup_steps=0))
    return train_step(
        policy, optimizer=optimizer, rows=make_rows(), settings=StepSettings(tokens_per_microbatch=64)
    )


def test_layers_run_as_they_are_where_there_is_no_compiler(
    make_policy: MakePolicy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with structlog.testing.capture_logs() as events:
        policy = make_policy(placement=Placement(compiled=True))
    assert same_bits(_gradient(make_policy()), _gradient(policy))
    (said,) = [event for event in events if event["event"] == "model.not_compiled"]
    assert said["lacks"] == "a C++ compiler (c++, g++ or clang++) on the PATH"
