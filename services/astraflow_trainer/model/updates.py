"""What a step does to the fp32 masters: AdamW, AdamW with 8-bit moments, and Muon.

Each owns the state of its own masters, laid out over ranks as they are, and says it by name for a checkpoint.
Invariant: a step depends on masters, gradients, state and learning rate alone, not on the number of ranks: numbers are
quantised within their row, and a matrix is orthogonalised whole. Called by `optimizer`, which clips gradients before
and rounds afterwards.
"""

import math
from collections.abc import Collection, Mapping
from typing import Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim.adamw import adamw

from astraflow.recipe import OptimizerSettings
from astraflow_trainer.model.model import local_part
from astraflow_trainer.model.quantized import ROOTS, SIGNED, blocks_of, dequantized, quantize_into

Masters = Mapping[str, nn.Parameter]
"""fp32 masters by Hugging Face name."""

_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
_NEWTON_SCHULZ_STEPS = 5


class Update(Protocol):
    """One rule for some of the masters."""

    def step(self, *, learning_rate: float) -> None:
        """Move the masters by their gradients, `.grad`, which stay as they are."""

    def state(self) -> dict[str, torch.Tensor]:
        """What it remembers, by flat name, for a checkpoint: the tensors themselves. Names never change."""

    def restored(self, *, num_steps: int) -> None:
        """Go on after `state()`'s tensors were overwritten in place, as after so many steps."""


def updates_for(
    masters: Masters, settings: OptimizerSettings, *, embeddings: Collection[str]
) -> list[Update]:
    """The rules of these settings, each master under one; `embeddings` names input embedding and output head."""
    decay = {name: _weight_decay(name, master, settings, embeddings) for name, master in masters.items()}
    if settings.kind == "adamw":
        return [AdamW(masters, settings, decay=decay)]
    rule = Muon if settings.kind == "muon" else AdamW8bit
    small = {name: master for name, master in masters.items() if master.ndim < 2}
    if settings.kind == "muon":
        small |= {name: masters[name] for name in embeddings if name in masters}
    large = {name: master for name, master in masters.items() if name not in small}
    rules: list[Update] = [rule(large, settings, decay=decay)]
    # An adapter has no vectors.
    return [*rules, AdamW(small, settings, decay=decay)] if small else rules


def _weight_decay(
    name: str, master: nn.Parameter, settings: OptimizerSettings, embeddings: Collection[str]
) -> float:
    if name in embeddings:
        kind = "embeddings"
    elif master.ndim >= 2:
        return settings.weight_decay
    else:
        kind = "biases" if name.endswith("bias") else "norms"
    return 0.0 if kind in settings.no_decay else settings.weight_decay


class AdamW:
    """arXiv 1711.05101, torch's fused kernel; moments are fp32, 8 bytes per weight."""

    def __init__(self, masters: Masters, settings: OptimizerSettings, *, decay: Mapping[str, float]) -> None:
        self._masters = masters
        self._num_steps = 0
        # A group for each weight decay, in an order that all ranks share.
        groups = [
            {
                "params": [master for name, master in masters.items() if decay[name] == value],
                "weight_decay": value,
            }
            for value in sorted({decay[name] for name in masters}, reverse=True)
        ]
        self._adam = torch.optim.AdamW(
            groups,
            lr=settings.learning_rate,
            betas=(settings.beta1, settings.beta2),
            eps=settings.eps,
            fused=True,
        )

    def step(self, *, learning_rate: float) -> None:
        """Move the masters."""
        for group in self._adam.param_groups:
            group["lr"] = learning_rate
        self._adam.step()
        self._num_steps += 1

    def state(self) -> dict[str, torch.Tensor]:
        """Both moments; zeros before the first step."""
        found: dict[str, torch.Tensor] = {}
        for name, master in self._masters.items():
            moments = self._adam.state[master]
            if not moments:
                moments["step"] = torch.tensor(float(self._num_steps), device=local_part(master).device)
                moments["exp_avg"] = torch.zeros_like(master, memory_format=torch.preserve_format)
                moments["exp_avg_sq"] = torch.zeros_like(master, memory_format=torch.preserve_format)
            found |= {f"exp_avg.{name}": moments["exp_avg"], f"exp_avg_sq.{name}": moments["exp_avg_sq"]}
        return found

    def restored(self, *, num_steps: int) -> None:
        """Go on after so many steps."""
        self._num_steps = num_steps
        for master in self._masters.values():
            self._adam.state[master]["step"].fill_(num_steps)


class AdamW8bit:
    """AdamW whose moments are one byte a weight and moment, beside a scale for each 256 weights of a row.

    The dynamic 8-bit type of arXiv 2110.02861, of the first moment and of the root of the second, which is never
    rounded down to 0 (a weight would leap by its moment over eps). Blocks end with their row, and ranks share whole
    rows, so a checkpoint is bit for bit the same for any number of them.
    """

    def __init__(self, masters: Masters, settings: OptimizerSettings, *, decay: Mapping[str, float]) -> None:
        self._masters, self._settings, self._decay = masters, settings, decay
        self._num_steps = 0
        self._state: dict[str, torch.Tensor] = {}
        for name, master in masters.items():
            like = master.detach()
            for moment in ("exp_avg", "exp_avg_sq"):
                self._state[f"{moment}_codes.{name}"] = torch.full_like(
                    like, SIGNED.zero if moment == "exp_avg" else ROOTS.zero, dtype=torch.uint8
                )
                self._state[f"{moment}_scales.{name}"] = torch.zeros_like(
                    like[..., : blocks_of(like.shape[-1])], memory_format=torch.contiguous_format
                )

    @torch.no_grad()
    def step(self, *, learning_rate: float) -> None:
        """Move the masters; the moments of one matrix at a time exist as fp32."""
        self._num_steps += 1
        for name, master in self._masters.items():
            if master.grad is not None and local_part(master).numel():
                self._move(name, master, local_part(master.grad), learning_rate)

    def _move(self, name: str, master: nn.Parameter, gradient: torch.Tensor, learning_rate: float) -> None:
        weights, settings = local_part(master).detach(), self._settings
        codes, scales = (
            {
                moment: local_part(self._state[f"{moment}_{part}.{name}"])
                for moment in ("exp_avg", "exp_avg_sq")
            }
            for part in ("codes", "scales")
        )
        first = dequantized(codes["exp_avg"], scales["exp_avg"], SIGNED)
        second = dequantized(codes["exp_avg_sq"], scales["exp_avg_sq"], ROOTS).square_()
        adamw(
            [weights], [gradient], [first], [second], [],
            [torch.tensor(float(self._num_steps - 1), device=weights.device)],
            fused=True, amsgrad=False, maximize=False,
            beta1=settings.beta1, beta2=settings.beta2, lr=learning_rate,
            weight_decay=self._decay[name], eps=settings.eps,
        )  # fmt: skip
        quantize_into(codes["exp_avg"], scales["exp_avg"], first, SIGNED)
        quantize_into(codes["exp_avg_sq"], scales["exp_avg_sq"], second.sqrt_(), ROOTS)

    def state(self) -> dict[str, torch.Tensor]:
        """Codes (uint8) and scales (fp32) of both moments."""
        return self._state

    def restored(self, *, num_steps: int) -> None:
        """Go on after so many steps."""
        self._num_steps = num_steps


class Muon:
    """Matrices move by their momentum, orthogonalised: https://kellerjordan.github.io/posts/muon, with the scale of
    arXiv 2502.16982, 0.2 · √max(rows, columns), by which AdamW's learning rate and weight decay fit.

    A matrix that ranks share is gathered, and each rank computes all of it: five times six products of a matrix with
    itself, small beside a batch's. Stacked experts are matrices of their own, and stay where they are. Momentum is
    fp32, 4 bytes per weight. `torch.optim.Muon` would iterate over the shards in bf16, whose sums depend on how many
    there are, and takes no stacks.
    """

    def __init__(self, masters: Masters, settings: OptimizerSettings, *, decay: Mapping[str, float]) -> None:
        self._masters, self._settings, self._decay = masters, settings, decay
        self._momentum = {name: torch.zeros_like(master.detach()) for name, master in masters.items()}

    @torch.no_grad()
    def step(self, *, learning_rate: float) -> None:
        """Move the masters; a collective when they are sharded."""
        momentum = self._settings.momentum
        for name, master in self._masters.items():
            if master.grad is None:
                continue
            kept = self._momentum[name].lerp_(master.grad, 1 - momentum)
            direction = _orthogonal(master.grad.lerp(kept, momentum))
            rows, columns = master.shape[-2:]
            weights = local_part(master)
            weights.mul_(1 - learning_rate * self._decay[name])
            weights.add_(direction, alpha=-learning_rate * 0.2 * math.sqrt(max(rows, columns)))

    def state(self) -> dict[str, torch.Tensor]:
        """The momentum."""
        return {f"momentum.{name}": momentum for name, momentum in self._momentum.items()}

    def restored(self, *, num_steps: int) -> None:
        """Nothing counts steps."""


def _orthogonal(update: torch.Tensor) -> torch.Tensor:
    """This rank's rows of the matrix (or whole matrices of the stack) whose singular values are near 1 instead."""
    if not isinstance(update, DTensor) or update.ndim > 2:
        return orthogonalized(local_part(update))
    mesh = update.device_mesh
    # What is kept on the host crosses to the device for the products.
    whole = orthogonalized(update.full_tensor().to(mesh.device_type))
    spread = distribute_tensor(whole, mesh, update.placements, src_data_rank=None)
    return spread.to_local().to(update.to_local().device)


def orthogonalized(matrices: torch.Tensor) -> torch.Tensor:
    """Newton–Schulz: five rounds of X ← aX + (bXXᵀ + c(XXᵀ)²)X on [..., rows, columns] scaled by its norm.

    In bf16 on a GPU, as published; fp32 on a CPU, where bf16 is no faster.
    """
    a, b, c = _NEWTON_SCHULZ
    compute = torch.bfloat16 if matrices.device.type == "cuda" else matrices.dtype
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = (matrices.mT if tall else matrices).to(compute)
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=1e-7)
    for _ in range(_NEWTON_SCHULZ_STEPS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    found: torch.Tensor = x.mT if tall else x
    return found.to(matrices.dtype)
