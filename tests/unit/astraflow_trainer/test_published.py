"""Published bytes are the model's weights, bit for bit, and stay as they were taken."""

from collections.abc import Callable

import numpy as np
import torch

from astraflow_trainer.model import PolicyModel, local_part
from astraflow_trainer.optimizer import MasterOptimizer, OptimizerSettings
from astraflow_trainer.published import published_shards, published_tensors


def test_bits_are_the_bf16_patterns_of_the_masters(make_policy: Callable[..., PolicyModel]) -> None:
    policy = make_policy()
    optimizer = MasterOptimizer(policy, settings=OptimizerSettings())
    tensors = published_tensors(policy)
    assert list(tensors) == [name for name, _ in policy.hf_parameters()]
    for name, bits in tensors.items():
        assert bits.dtype == np.uint16
        widened = (bits.astype(np.uint32) << 16).view(np.float32)
        master = local_part(optimizer.masters[name]).detach()
        assert np.array_equal(widened, master.to(torch.bfloat16).float().numpy()), name


def test_later_steps_do_not_change_what_was_taken(make_policy: Callable[..., PolicyModel]) -> None:
    policy = make_policy()
    taken = published_tensors(policy)
    copies = {name: bits.copy() for name, bits in taken.items()}
    with torch.no_grad():
        for parameter in policy.parameters():
            local_part(parameter).add_(1.0)
    assert all(np.array_equal(taken[name], copies[name]) for name in taken)
    assert not np.array_equal(published_tensors(policy)["model.norm.weight"], copies["model.norm.weight"])


def test_with_one_rank_the_shards_are_the_whole_tensors(make_policy: Callable[..., PolicyModel]) -> None:
    policy = make_policy()
    tensors = published_tensors(policy)
    shards = published_shards(policy)
    assert [shard.name for shard in shards] == list(tensors)
    for shard in shards:
        assert shard.first_row == 0
        assert shard.shape == tensors[shard.name].shape
        assert np.array_equal(shard.bits, tensors[shard.name])
