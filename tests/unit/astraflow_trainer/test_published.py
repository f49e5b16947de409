"""Published bytes are the model's weights, bit for bit, and stay as they were taken."""

from collections.abc import Callable

import numpy as np
import torch

from astraflow_trainer.model import PolicyModel, local_part
from astraflow_trainer.optimizer import MasterOptimizer, OptimizerSettings
from astraflow_trainer.published import published_shards, same_shards


def test_bits_are_the_bf16_patterns_of_the_masters(make_policy: Callable[..., PolicyModel]) -> None:
    policy = make_policy()
    optimizer = MasterOptimizer(policy, settings=OptimizerSettings())
    taken = published_shards(policy)
    assert [spec.name for spec in taken.specs] == sorted(name for name, _ in policy.hf_parameters())
    for spec, shard in taken.held():
        assert shard.elements.dtype == np.uint16
        widened = (shard.elements.astype(np.uint32) << 16).view(np.float32)
        master = local_part(optimizer.masters[spec.name]).detach()
        assert np.array_equal(widened, master.to(torch.bfloat16).float().numpy().reshape(-1)), spec.name


def test_later_steps_do_not_change_what_was_taken(make_policy: Callable[..., PolicyModel]) -> None:
    policy = make_policy()
    taken = published_shards(policy)
    copies = {name: shard.elements.copy() for name, shard in taken.shards.items()}
    with torch.no_grad():
        for parameter in policy.parameters():
            local_part(parameter).add_(1.0)
    assert all(np.array_equal(taken.shards[name].elements, copies[name]) for name in copies)
    later = published_shards(policy).shards["model.norm.weight"].elements
    assert not np.array_equal(later, copies["model.norm.weight"])


def test_with_one_rank_the_shards_are_the_whole_tensors(make_policy: Callable[..., PolicyModel]) -> None:
    policy = make_policy()
    for spec, shard in published_shards(policy).held():
        assert (shard.start, shard.stop) == (0, spec.num_elements)
        assert spec.shape == tuple(dict(policy.hf_parameters())[spec.name].shape)


def test_a_ranks_part_of_a_whole_model_is_what_it_holds_of_its_own(
    make_policy: Callable[..., PolicyModel],
) -> None:
    taken = published_shards(make_policy())
    other = {
        spec.name: (np.arange(spec.num_elements) % 7).astype(np.uint16).reshape(spec.shape)
        for spec in taken.specs
    }
    part = same_shards(other, like=taken)
    assert part.specs == taken.specs
    for spec, shard in part.held():
        assert np.array_equal(shard.elements, other[spec.name].reshape(-1)[shard.start : shard.stop])
        assert not np.shares_memory(shard.elements, other[spec.name])
