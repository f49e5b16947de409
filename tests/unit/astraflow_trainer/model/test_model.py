"""The policy model scores like the plain Hugging Face model, packed or not, sharded or not."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from astraflow_trainer.batches.packing import pack
from astraflow_trainer.batches.rows import TrainingRow
from astraflow_trainer.model.model import (
    PolicyModel,
    build_causal_lm,
    load_causal_lm,
    local_part,
    save_causal_lm,
)
from astraflow_trainer.publish.published import policy_layout
from support.tiny_training import TINY, MakePolicy, make_row, make_rows


def _plain_logprobs(policy: PolicyModel, row: TrainingRow) -> torch.Tensor:
    """What the library's own forward pass says about one row alone."""
    ids = torch.from_numpy(row.token_ids.astype("int64"))[None]
    logits = policy.causal_lm(input_ids=ids, use_cache=False).logits[0, :-1] / row.temperature
    chosen = torch.log_softmax(logits, -1).gather(1, ids[0, 1:, None])[:, 0]
    return chosen[torch.from_numpy(row.loss_mask[1:])]


def _scores_by_row(policy: PolicyModel, rows: list[TrainingRow], **packing: int) -> list[torch.Tensor]:
    batches = pack(rows, **packing)
    scored = [(batch.row_N, policy.score(batch).logprob_N) for batch in batches]
    return [torch.cat([scores[index == row] for index, scores in scored]) for row in range(len(rows))]


@pytest.mark.parametrize("packing", [{"token_budget": 500}, {"token_budget": 80, "lane_tokens": 40}])
def test_scores_equal_the_plain_model_row_by_row(unsharded: PolicyModel, packing: dict[str, int]) -> None:
    policy, rows = unsharded, make_rows()
    with torch.no_grad():
        for row, scores in zip(rows, _scores_by_row(policy, rows, **packing), strict=True):
            torch.testing.assert_close(scores, _plain_logprobs(policy, row), atol=5e-6, rtol=0)


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3"])
def test_a_model_of_each_family_is_built_scored_and_published_whole(tmp_path: Path, model_type: str) -> None:
    policy = PolicyModel(build_causal_lm(replace(TINY, model_type=model_type, head_dim=16), seed=0))
    for name, parameter in policy.hf_parameters():
        if name.endswith(".bias"):
            torch.nn.init.normal_(parameter)
    rows = make_rows()
    with torch.no_grad():
        for row, scores in zip(rows, _scores_by_row(policy, rows, token_budget=80), strict=True):
            torch.testing.assert_close(scores, _plain_logprobs(policy, row), atol=5e-6, rtol=0)
    save_causal_lm(policy.causal_lm, tmp_path)
    saved = {name: tuple(tensor.shape) for name, tensor in load_file(tmp_path / "model.safetensors").items()}
    assert saved == {spec.name: spec.shape for spec in policy_layout(policy).specs}
    assert load_causal_lm(tmp_path).config.model_type == model_type


def test_packed_rows_never_see_each_other(unsharded: PolicyModel) -> None:
    kept = make_row([3, 4], [5, 6])
    with torch.no_grad():
        before, _ = _scores_by_row(unsharded, [kept, make_row([7], [8])], token_budget=12, lane_tokens=6)
        after, _ = _scores_by_row(unsharded, [kept, make_row([9], [1])], token_budget=12, lane_tokens=6)
    assert torch.equal(before, after)


def test_sharding_changes_nothing(make_policy: MakePolicy) -> None:
    rows = make_rows()
    results = []
    for sharded in (False, True):
        policy = make_policy(sharded=sharded)
        scores = torch.cat(_scores_by_row(policy, rows, token_budget=60))
        scores.sum().backward()
        gradients = [local_part(parameter.grad) for _, parameter in policy.hf_parameters()]
        results.append([scores.detach(), *gradients])
    torch.testing.assert_close(results[1], results[0])


def test_entropy_is_that_of_the_row_at_its_temperature(unsharded: PolicyModel) -> None:
    row = make_row([3], [5], temperature=0.5)
    (batch,) = pack([row], token_budget=4)
    with torch.no_grad():
        logits = unsharded.causal_lm(input_ids=torch.tensor([[3]])).logits[0, 0] / 0.5
        entropy = torch.distributions.Categorical(logits=logits).entropy()
        torch.testing.assert_close(unsharded.score(batch).entropy_N[0], entropy, atol=1e-5, rtol=0)


def test_names_are_those_of_a_checkpoint_and_tied_weights_come_once(policy: PolicyModel) -> None:
    names = [name for name, _ in policy.hf_parameters()]
    assert names[0] == "model.embed_tokens.weight"
    assert "model.layers.1.self_attn.q_norm.weight" in names
    assert "lm_head.weight" not in names
    assert len(names) == len(set(names))


def test_equal_seeds_build_equal_models_without_touching_the_global_stream(make_policy: MakePolicy) -> None:
    state = torch.get_rng_state()
    first, second, other = (make_policy(seed=seed, sharded=False).state_dict() for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)


def test_a_saved_model_loads_as_its_bf16_rounding(unsharded: PolicyModel, tmp_path: Path) -> None:
    save_causal_lm(unsharded.causal_lm, tmp_path)
    loaded = load_causal_lm(tmp_path)
    assert loaded.config.architectures == ["Qwen3ForCausalLM"]
    for name, parameter in loaded.named_parameters():
        assert parameter.dtype == torch.float32
        original = unsharded.causal_lm.get_parameter(name)
        assert torch.equal(parameter, original.to(torch.bfloat16).float()), name
