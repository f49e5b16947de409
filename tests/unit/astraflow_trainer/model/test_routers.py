"""Router replay: recorded experts compute, with gate weights of the trainer's own router, and nothing else moves."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers

from astraflow.recipe import RowLimits
from astraflow_trainer.batches.fitting import fitting_rows
from astraflow_trainer.batches.packing import MicroBatch, pack
from astraflow_trainer.batches.routing import RouterShape
from astraflow_trainer.batches.rows import TrainingRow
from astraflow_trainer.model.model import PolicyModel
from astraflow_trainer.ranks.reductions import OneRank
from support.tiny_training import make_rows

LAYERS, EXPERTS, EACH = 2, 8, 2


def _mixture(*, noise: float = 0.0, family: str = "qwen3_moe") -> PolicyModel:
    """A tiny model; with `noise` its routers are another's by so much, as if they had been rounded otherwise."""
    config = transformers.AutoConfig.for_model(
        family, vocab_size=32, hidden_size=16, intermediate_size=24, moe_intermediate_size=12,
        num_hidden_layers=LAYERS, num_attention_heads=2, num_key_value_heads=1, head_dim=8,
        num_experts=EXPERTS, num_experts_per_tok=EACH, norm_topk_prob=family == "qwen3_moe",
        shared_expert_intermediate_size=12, decoder_sparse_step=1,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                torch.nn.init.normal_(parameter, std=0.3)
            if name.endswith("mlp.gate.weight"):
                parameter.data += noise * torch.randn_like(parameter)
    return PolicyModel(model).train()


@contextmanager
def _recorded(policy: PolicyModel) -> Iterator[list[torch.Tensor]]:
    """The experts that each router chooses, pass by pass: what an engine returns."""
    chosen: list[torch.Tensor] = []
    routers = [module for name, module in policy.named_modules() if name.endswith("mlp.gate")]
    hooks = [
        router.register_forward_hook(lambda _module, _given, found: chosen.append(found[2]))
        for router in routers
    ]
    yield chosen
    for hook in hooks:
        hook.remove()


def _by_engine(engine: PolicyModel, rows: list[TrainingRow]) -> tuple[list[TrainingRow], list[np.ndarray]]:
    """The rows with the experts that the engine sent their tokens to, and its log-probs of them."""
    routed, logprobs = [], []
    for row in rows:
        (batch,) = pack([row], token_budget=1000)
        with torch.no_grad(), _recorded(engine) as chosen:
            logprobs.append(engine.score(batch).logprob_N.numpy())
        routing = torch.stack(chosen, dim=1).numpy().astype(np.uint16)
        routed.append(replace(row, expert_routing=routing))
    return routed, logprobs


def _gap(policy: PolicyModel, rows: list[TrainingRow], logprobs: list[np.ndarray]) -> float:
    """The mean distance to the engine, the rows packed into one micro-batch."""
    (batch,) = pack(rows, token_budget=1000)
    with torch.no_grad():
        found = policy.score(batch).logprob_N
    expected = np.concatenate([logprobs[place] for place in batch.row_N.unique_consecutive().tolist()])
    return float(np.abs(found.numpy() - expected).mean())


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen2_moe"])
def test_an_engine_whose_routers_round_otherwise_is_agreed_with_better(family: str) -> None:
    rows = make_rows(num_rows=48)
    engine, trainer = _mixture(noise=0.005, family=family), _mixture(family=family)
    routed, logprobs = _by_engine(engine, rows)
    without, replayed = _gap(trainer, rows, logprobs), _gap(trainer, routed, logprobs)
    assert without > 1e-3  # some tokens go to other experts
    assert replayed < 0.5 * without


def test_an_engine_with_the_same_routers_is_agreed_with_to_rounding() -> None:
    """Rows that bring nothing, beside some that do, choose for themselves."""
    rows = make_rows(num_rows=8)
    routed, logprobs = _by_engine(_mixture(), rows)
    trainer, mixed = _mixture(), [*routed[:4], *rows[4:]]
    for given in (rows, routed, mixed):
        assert _gap(trainer, given, logprobs) < 1e-5


def test_only_the_choice_is_replayed_and_the_routers_have_a_gradient() -> None:
    rows = make_rows(num_rows=4)
    other = [_sent_to([5, 1], row) for row in rows]
    policy = _mixture()
    (batch,) = pack(other, token_budget=1000)
    with _recorded(policy) as chosen:
        policy.score(batch).logprob_N.sum().backward()
    held = batch.document_ids_BL.flatten() >= 0
    for layer in chosen:
        assert (layer[held] == torch.tensor([5, 1])).all()
    for name, parameter in policy.named_parameters():
        if name.endswith("gate.weight"):
            assert parameter.grad is not None
            moved = parameter.grad.abs().sum(-1) > 0
            assert moved[[1, 5]].all()
    # Gate weights by the formula: the router's own probabilities of these two, made to sum to 1.
    router = next(module for name, module in policy.named_modules() if name.endswith("mlp.gate"))
    hidden = torch.randn(3, 16, generator=torch.Generator().manual_seed(1))
    policy.routers.routed_SXK = torch.tensor([[[5, 1]] * LAYERS] * 3)
    _, weights, _ = router(hidden)
    odds = (hidden.double() @ router.weight.double().T)[:, [5, 1]].exp()
    torch.testing.assert_close(weights.double(), odds / odds.sum(-1, keepdim=True), rtol=1e-5, atol=1e-6)


def test_a_model_that_is_not_trained_chooses_for_itself() -> None:
    rows = make_rows(num_rows=4)
    wrong = [_sent_to([5, 1], row) for row in rows]
    reference = _mixture().eval()
    with torch.no_grad():
        plain, given = (reference.score(_packed(of)).logprob_N for of in (rows, wrong))
    assert torch.equal(plain, given)


def _sent_to(experts: list[int], row: TrainingRow) -> TrainingRow:
    """The row as if all its tokens had gone to these experts."""
    routing = np.tile(np.array(experts, np.uint16), (row.num_tokens, LAYERS, 1))
    return replace(row, expert_routing=routing)


def _packed(rows: list[TrainingRow]) -> MicroBatch:
    (batch,) = pack(rows, token_budget=1000)
    return batch


def test_a_row_whose_experts_are_not_the_models_goes_with_its_group() -> None:
    rows = make_rows(num_rows=8)
    rows[1] = replace(rows[1], expert_routing=np.zeros((rows[1].num_tokens, 1, 2), np.uint16))
    shape = _mixture().routers.shape
    assert shape == RouterShape(num_layers=LAYERS, num_experts=EXPERTS, experts_per_token=EACH)
    fitting = fitting_rows(rows, limits=RowLimits(1000, 32), ranks=OneRank(), routers=shape)
    assert (fitting.num_left_out, list(fitting.rows)) == (4, rows[4:])
