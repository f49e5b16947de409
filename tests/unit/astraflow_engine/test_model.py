"""The forward pass agrees with transformers, whatever the head layout and however tokens are fed."""

from pathlib import Path

import pytest
import torch

from astraflow_engine import kv_cache, model, model_config, weights
from support.tiny_models import TinyShape, load_reference, save_tiny_model

TOLERANCE = 1e-4
CAPACITY = 40


class Feeder:
    """Feeds token ids through both passes and returns logits."""

    def __init__(self, folder: Path, *, num_slots: int = 6) -> None:
        config = model_config.load_model_config(folder)
        self.weights = weights.load_weights(folder, config=config)
        self.model = model.Decoder(config, num_positions=CAPACITY)
        self.cache = kv_cache.KvCache(config, num_slots=num_slots, capacity=CAPACITY)

    def extend(self, tokens: torch.Tensor, *, start: int, rows: list[int]) -> torch.Tensor:
        """Logits [B, N, V] of N tokens per row, all rows starting at `start`."""
        positions = torch.arange(start, start + tokens.shape[1]).expand_as(tokens)
        places = {"positions_BN": positions, "write_at_BN": positions, "rows_B": torch.tensor(rows)}
        length = start + tokens.shape[1]
        hidden = self.model.extend(self.weights, self.cache, tokens_BN=tokens, length=length, **places)
        return self.weights.head(hidden)

    def decode(self, tokens: torch.Tensor, *, position: int, idle: list[int]) -> torch.Tensor:
        """Logits [B, V] of one token for each leading row that is not idle."""
        rows = torch.tensor([row for row in range(len(tokens)) if row not in idle])
        places = {"positions_B": torch.full_like(rows, position), "rows_B": rows}
        hidden = self.model.decode(
            self.weights, self.cache, tokens_B=tokens[rows], length=position + 1, **places
        )
        return self.weights.head(hidden)


SHAPES = [
    pytest.param(TinyShape(), id="grouped"),
    pytest.param(TinyShape(tied=False), id="untied"),
    pytest.param(TinyShape(num_heads=4, num_kv_heads=4), id="one-to-one"),
    pytest.param(TinyShape(num_heads=4, num_kv_heads=1, head_dim=16), id="one-kv-head"),
    pytest.param(TinyShape(num_layers=4), id="deep"),
    pytest.param(TinyShape(more={"attention_bias": True}), id="qwen3-biased"),
    pytest.param(TinyShape(model_type="qwen2"), id="qwen2"),
    pytest.param(TinyShape(model_type="qwen2", tied=False, head_dim=16), id="qwen2-wide-heads"),
    pytest.param(TinyShape(model_type="llama", tied=False), id="llama"),
    pytest.param(
        TinyShape(model_type="llama", more={"attention_bias": True, "mlp_bias": True}), id="llama-biased"
    ),
    *(
        pytest.param(TinyShape(model_type=family, head_dim=16, rope=rope), id=f"{family}-{rope['rope_type']}")
        for family, rope in (
            # Fast, slow and interpolated pairs within the 30 positions of the test.
            (
                "llama",
                {
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 48,
                },
            ),
            ("llama", {"rope_type": "linear", "factor": 3.0}),
            (
                "qwen2",
                {
                    "rope_type": "yarn",
                    "factor": 4.0,
                    "original_max_position_embeddings": 32,
                    "beta_fast": 4.0,
                },
            ),
            ("qwen3", {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.5, "truncate": False}),
        )
    ),
]


@pytest.mark.parametrize("shape", SHAPES)
@torch.inference_mode()
def test_logits_agree_with_transformers_through_prefill_and_decode(tmp_path: Path, shape: TinyShape) -> None:
    folder = save_tiny_model(tmp_path / "model", shape=shape)
    feeder, reference = Feeder(folder), load_reference(folder)
    tokens = torch.randint(3, 97, (4, 30), generator=torch.Generator().manual_seed(1))
    expected = reference(input_ids=tokens).logits
    rows = [1, 0, 2, 3]
    found = [feeder.extend(tokens[:, a:b], start=a, rows=rows) for a, b in ((0, 11), (11, 20))]
    for position in range(20, 30):
        logits = feeder.decode(tokens[rows, position], position=position, idle=[])
        found.append(logits[rows, None])
    assert float((torch.cat(found, dim=1) - expected).abs().max()) <= TOLERANCE


@torch.inference_mode()
def test_an_idle_row_between_running_ones_keeps_what_it_holds(folder: Path) -> None:
    feeder = Feeder(folder)
    tokens = torch.randint(3, 97, (3, 12), generator=torch.Generator().manual_seed(2))
    feeder.extend(tokens[:, :8], start=0, rows=[0, 1, 2])
    held = torch.stack(feeder.cache.gathered_rows(0, rows_B=torch.tensor([1]), length=CAPACITY))
    feeder.decode(tokens[:, 8], position=8, idle=[1])
    now = torch.stack(feeder.cache.gathered_rows(0, rows_B=torch.tensor([1]), length=CAPACITY))
    assert torch.equal(held, now)
