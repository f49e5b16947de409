"""Rows of the cache: copied, exchanged, and resident only once written."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from astraflow_engine.kv_cache import KvCache
from astraflow_engine.model_config import ModelConfig, load_model_config
from support.tiny_models import save_tiny_model


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    return load_model_config(save_tiny_model(tmp_path_factory.mktemp("models") / "model"))


@pytest.fixture
def cache(config: ModelConfig) -> KvCache:
    return KvCache(config, num_slots=4, capacity=10)


def row(cache: KvCache, index: int, *, length: int) -> torch.Tensor:
    """Keys and values of one row in the last layer."""
    return torch.stack(cache.gathered_rows(1, rows_B=torch.tensor([index]), length=length))


def fill(cache: KvCache, index: int, *, length: int, value: float) -> None:
    places = cache.places(torch.tensor([index]), torch.arange(length)[None])
    for layer in range(2):
        keys = torch.full((1, length, 2, 8), value)
        cache.write(layer, places, keys=keys, values=-keys)


def test_tokens_are_stored_where_their_rows_and_positions_say(cache: KvCache) -> None:
    places = cache.places(torch.tensor([2, 0]), torch.tensor([[3, 4], [0, 10]]))
    keys = torch.arange(2 * 2 * 2 * 8, dtype=torch.float32).view(2, 2, 2, 8) + 1
    cache.write(1, places, keys=keys, values=-keys)
    assert torch.equal(row(cache, 2, length=10)[0, 0, :, 3:5], keys[0].transpose(0, 1))
    assert torch.equal(row(cache, 0, length=10)[1, 0, :, 0], -keys[1, 0])
    assert row(cache, 0, length=10)[0].count_nonzero() == 2 * 8
    assert not row(cache, 1, length=10).any()


def test_one_token_per_leading_row_is_stored_without_naming_rows_twice(cache: KvCache) -> None:
    keys = torch.rand(3, 2, 8)
    cache.write(1, cache.places(torch.arange(3), torch.tensor([5, 0, 9])), keys=keys, values=keys)
    stored, _ = cache.leading_rows(1, num_rows=3, length=10)
    assert torch.equal(torch.stack([stored[0, :, 5], stored[1, :, 0], stored[2, :, 9]]), keys)


def test_a_copied_row_is_equal_up_to_the_length_and_untouched_beyond(cache: KvCache) -> None:
    fill(cache, 0, length=8, value=3.0)
    cache.copy_row(0, targets=[2, 3], length=5)
    assert torch.equal(row(cache, 2, length=5), row(cache, 0, length=5))
    assert torch.equal(row(cache, 3, length=5), row(cache, 0, length=5))
    assert not row(cache, 3, length=10)[..., 5:, :].any()
    assert not row(cache, 1, length=10).any()


def test_exchanged_rows_swap_their_contents(cache: KvCache) -> None:
    fill(cache, 0, length=4, value=1.0)
    fill(cache, 2, length=7, value=2.0)
    first, second = row(cache, 0, length=7).clone(), row(cache, 2, length=7).clone()
    cache.exchange_rows(0, 2, length=7)
    assert torch.equal(row(cache, 0, length=7), second)
    assert torch.equal(row(cache, 2, length=7), first)


MEASURE = """
import sys, psutil, torch
from pathlib import Path
from dataclasses import replace
from astraflow_engine.kv_cache import KvCache
from astraflow_engine.model_config import load_model_config
config = replace(load_model_config(Path(sys.argv[1])), num_layers=8)
resident = psutil.Process().memory_info().rss
cache = KvCache(config, num_slots=256, capacity=1023)
cache.places(torch.tensor([0]), torch.arange(1)[None])
print(psutil.Process().memory_info().rss - resident)
"""


def test_an_untouched_cache_costs_address_space_and_no_memory(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "model")
    # A process of its own: memory that earlier tests freed here would be zeroed, and so touched.
    grown = subprocess.run(
        [sys.executable, "-c", MEASURE, str(model)], capture_output=True, text=True, check=True
    )
    assert int(grown.stdout) < 2 * 8 * 256 * 2 * 1024 * 8 * 4 // 4
