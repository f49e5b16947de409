"""Rotary position embeddings: how far each pair of dimensions turns from one position to the next.

Owns the kinds of scaling whose frequencies do not depend on the length of a sequence; `model_config` refuses
the others. Computed in fp32 in the order of the published formulas, because an angle is a frequency times a
position: a last bit that differs shows at position 4000.

Shape legend: H head_dim.
"""

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearScaling:
    """Every position counts as 1 / `factor` of one."""

    factor: float
    attention_factor: float = 1.0

    def scaled(self, frequencies: torch.Tensor, *, theta: float) -> torch.Tensor:
        """Radians per position, [H / 2]."""
        return frequencies / self.factor


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3Scaling:
    """Llama 3.1: slow pairs turn 1 / `factor` as far, fast ones as before, those between are interpolated."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_positions: int
    attention_factor: float = 1.0

    def scaled(self, frequencies: torch.Tensor, *, theta: float) -> torch.Tensor:
        """Radians per position, [H / 2]."""
        turns = self.original_positions * frequencies / (2 * math.pi)
        kept = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        kept = kept.clamp(0.0, 1.0)
        return (1 - kept) * frequencies / self.factor + kept * frequencies


@dataclass(frozen=True, slots=True, kw_only=True)
class YarnScaling:
    """YaRN: as Llama 3.1 along a ramp over the pairs, with keys and queries that grow by `attention_factor`."""

    factor: float
    beta_fast: float
    beta_slow: float
    truncate: bool
    original_positions: int
    attention_factor: float

    def scaled(self, frequencies: torch.Tensor, *, theta: float) -> torch.Tensor:
        """Radians per position, [H / 2]."""
        head_dim = 2 * len(frequencies)
        low, high = (self._pair(turns, head_dim, theta=theta) for turns in (self.beta_fast, self.beta_slow))
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_dim - 1)
        # A ramp without width would divide by 0.
        width = high - low or 0.001
        scaled = ((torch.arange(len(frequencies), dtype=torch.float32) - low) / width).clamp(0.0, 1.0)
        return frequencies / self.factor * scaled + frequencies * (1 - scaled)

    def _pair(self, turns: float, head_dim: int, *, theta: float) -> float:
        """Where the pair stands that makes so many turns within the original positions."""
        return head_dim * math.log(self.original_positions / (turns * 2 * math.pi)) / (2 * math.log(theta))


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """The rotary embedding of a model."""

    theta: float
    scaling: LinearScaling | Llama3Scaling | YarnScaling | None = None

    def frequencies(self, head_dim: int) -> torch.Tensor:
        """Radians per position of each pair of dimensions, float32[H / 2]."""
        exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
        plain: torch.Tensor = 1.0 / self.theta**exponents
        return plain if self.scaling is None else self.scaling.scaled(plain, theta=self.theta)


class RotaryTable:
    """Cosines and sines of every position, [positions, head_dim], half-split layout."""

    def __init__(self, rope: Rope, *, head_dim: int, num_positions: int) -> None:
        angles = torch.outer(torch.arange(num_positions).float(), rope.frequencies(head_dim))
        growth = rope.scaling.attention_factor if rope.scaling else 1.0
        self._cosines = torch.cat([angles, angles], dim=-1).cos().mul_(growth)
        # The sign of the rotated half lives in the table, so that a rotation needs no negation.
        sines = torch.cat([angles, angles], dim=-1).sin().mul_(growth)
        sines[:, : head_dim // 2] *= -1
        self._signed_sines = sines

    def at(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and signed sines, [*positions.shape, 1, H]: the same for every head."""
        return self._cosines[positions].unsqueeze(-2), self._signed_sines[positions].unsqueeze(-2)
