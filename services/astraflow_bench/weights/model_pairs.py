"""Versions of a model as training leaves them: simulated at any size, and from a small model that is trained.

Invariant: everything comes from the seed. `bench.weights` measures the codecs on them.
"""

import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.nn import functional

Bits = npt.NDArray[np.uint16]
Model = dict[str, Bits]

# Deviation of AdamW's update m / sqrt(v) in units of the learning rate, with beta1 = 0.9 and gradients of no
# correlation: sqrt((1 - 0.9) / (1 + 0.9)).
_UPDATE_DEVIATION = 0.229
_MOMENTUM = 0.9
_ROWS, _WIDTH = 4096, 1024


@dataclass(frozen=True, kw_only=True)
class Versions:
    """Consecutive versions of one model, oldest first, as bfloat16 bits."""

    source: str
    learning_rate: float
    models: Sequence[Model]


class SimulatedTraining:
    """Matrices of rows of 1024 normal weights, whose rows and columns have gains of their own, under AdamW.

    Weights keep float32 masters, so what rounding left over is uniform, as in the middle of a long run.
    """

    def __init__(self, *, num_elements: int, learning_rate: float, seed: int) -> None:
        self._draw = np.random.default_rng(seed)
        self._learning_rate = np.float32(learning_rate)
        self._masters, self._momenta = _start(self._draw, num_elements)

    def step(self) -> None:
        """Take one step."""
        for name, master in self._masters.items():
            master -= self._learning_rate * self._momenta[name]
            fresh = self._draw.standard_normal(master.shape, dtype=np.float32)
            self._momenta[name] = (
                np.float32(_MOMENTUM) * self._momenta[name] + np.float32(1 - _MOMENTUM) * fresh
            )

    def published(self) -> Model:
        """The weights as bfloat16 bits; a copy."""
        return {name: to_bf16(master) for name, master in self._masters.items()}


def simulated(*, num_elements: int, learning_rate: float, num_versions: int, seed: int) -> Versions:
    """Consecutive versions of a simulated training."""
    training = SimulatedTraining(num_elements=num_elements, learning_rate=learning_rate, seed=seed)
    models: list[Model] = []
    for number in range(num_versions):
        if number:
            training.step()
        models.append(training.published())
    return Versions(source="simulated", learning_rate=learning_rate, models=models)


def learning_rate_of(density: float, *, seed: int) -> float:
    """The learning rate at which a simulated step changes this share of the weights, to about a hundredth.

    Raises ValueError unless it lies between 0.0001 and 0.5.
    """
    if not 1e-4 <= density <= 0.5:
        raise ValueError(f"a density of {density} cannot be simulated; choose one from 0.0001 to 0.5")
    low, high = 1e-9, 1e-3
    for _ in range(20):
        middle = (low * high) ** 0.5
        before, after = simulated(num_elements=2**18, learning_rate=middle, num_versions=2, seed=seed).models
        changed = sum(np.count_nonzero(before[name] != after[name]) for name in before)
        low, high = (middle, high) if changed < density * 2**18 else (low, middle)
    return float((low * high) ** 0.5)


def to_bf16(values: npt.NDArray[np.float32]) -> Bits:
    """Bits of the nearest bfloat16, ties to even."""
    bits = values.view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return (rounded >> np.uint32(16)).astype(np.uint16)


def _start(
    draw: np.random.Generator, num_elements: int
) -> tuple[dict[str, npt.NDArray[np.float32]], dict[str, npt.NDArray[np.float32]]]:
    rows_in_all = max(1, num_elements // _WIDTH)
    masters, momenta = {}, {}
    for number, first in enumerate(range(0, rows_in_all, _ROWS)):
        shape = (min(_ROWS, rows_in_all - first), _WIDTH)
        gains = np.exp(0.25 * draw.standard_normal((shape[0], 1), dtype=np.float32)) * np.exp(
            0.25 * draw.standard_normal((1, _WIDTH), dtype=np.float32)
        )
        master = np.float32(0.02) * gains * draw.standard_normal(shape, dtype=np.float32)
        masters[f"layer.{number:03d}.weight"] = master
        momentum = np.float32(_UPDATE_DEVIATION) * draw.standard_normal(shape, dtype=np.float32)
        momenta[f"layer.{number:03d}.weight"] = momentum
    return masters, momenta


# ---------------------------------------------------------------- a model that is really trained


def trained(
    *, learning_rates: Sequence[float], warm_up_steps: int, steps: int, seed: int
) -> Iterator[Versions]:
    """The last two versions of a byte-level language model of 11 million weights, for each learning rate.

    It first learns Python's standard library at 1e-3, is rounded to bfloat16 as a published model is, and then
    takes policy-gradient steps with random advantages.
    """
    threads = torch.get_num_threads()
    # One thread: steps this small gain little from more, and those of a busy machine wait for each other.
    torch.set_num_threads(1)
    try:
        yield from _trained(learning_rates, warm_up_steps=warm_up_steps, steps=steps, seed=seed)
    finally:
        torch.set_num_threads(threads)


def _trained(
    learning_rates: Sequence[float], *, warm_up_steps: int, steps: int, seed: int
) -> Iterator[Versions]:
    torch.manual_seed(seed)
    draw = np.random.default_rng(seed)
    text = _text()
    model = _LanguageModel()
    _train(model, text, draw, learning_rate=1e-3, steps=warm_up_steps, policy_gradient=False)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16().float())
    start = {name: value.clone() for name, value in model.state_dict().items()}
    for learning_rate in learning_rates:
        model.load_state_dict(start)
        before = _train(model, text, draw, learning_rate=learning_rate, steps=steps, policy_gradient=True)
        yield Versions(source="trained", learning_rate=learning_rate, models=[before, _published(model)])


class _Block(nn.Module):
    width, heads = 640, 10

    def __init__(self) -> None:
        super().__init__()
        width = self.width
        self.attention_norm, self.mlp_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.output = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.gate, self.up = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, 3 * width, bias=False)
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        batch, length, width = x_BTD.shape
        query, key, value = (
            part.view(batch, length, self.heads, -1).transpose(1, 2)
            for part in self.qkv(self.attention_norm(x_BTD)).chunk(3, -1)
        )
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x_BTD = x_BTD + self.output(mixed.transpose(1, 2).reshape(batch, length, width))
        hidden = self.mlp_norm(x_BTD)
        after: torch.Tensor = x_BTD + self.down(functional.silu(self.gate(hidden)) * self.up(hidden))
        return after


class _LanguageModel(nn.Module):
    def __init__(self, *, num_layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, _Block.width)
        self.blocks = nn.ModuleList(_Block() for _ in range(num_layers))
        self.norm = nn.RMSNorm(_Block.width)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, 0.0, 0.02)

    def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        x_BTD = self.embed(tokens_BT)
        for block in self.blocks:
            x_BTD = block(x_BTD)
        logits: torch.Tensor = self.norm(x_BTD) @ self.embed.weight.T
        return logits


def _text() -> torch.Tensor:
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:60]
    return torch.tensor(np.frombuffer(b"".join(path.read_bytes() for path in files), np.uint8).copy()).long()


def _train(
    model: _LanguageModel,
    text: torch.Tensor,
    draw: np.random.Generator,
    *,
    learning_rate: float,
    steps: int,
    policy_gradient: bool,
) -> Model:
    """Take the steps; return what was published before the last one."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.01)
    before: Model = {}
    for _ in range(steps):
        before = _published(model)
        optimizer.zero_grad()
        loss = _loss(model, text, draw, policy_gradient=policy_gradient)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return before


def _loss(
    model: _LanguageModel, text: torch.Tensor, draw: np.random.Generator, *, policy_gradient: bool
) -> torch.Tensor:
    length, batch = 96, 6
    starts = draw.integers(0, len(text) - length - 1, batch).tolist()
    tokens_BT = torch.stack([text[start : start + length + 1] for start in starts])
    logits = model(tokens_BT[:, :-1]).flatten(0, 1)
    nll_BT = functional.cross_entropy(logits, tokens_BT[:, 1:].flatten(), reduction="none").view(
        batch, length
    )
    if not policy_gradient:
        return nll_BT.mean()
    advantages_B = torch.tensor(draw.standard_normal(batch), dtype=torch.float32)
    return (advantages_B * nll_BT.mean(1)).mean()


def _published(model: nn.Module) -> Model:
    return {
        name: parameter.detach().bfloat16().view(torch.uint16).numpy().copy()
        for name, parameter in model.named_parameters()
    }
