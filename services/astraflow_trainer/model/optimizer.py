"""AdamW on fp32 masters, and the rounding that keeps the model equal to what is published.

Owns the masters, their moments and the learning-rate schedule. Invariant: after construction, a step or a
restore, each model parameter equals its master rounded to bf16 (nearest, ties to even), or is the master, of a model
that rounds when it gathers; a discarded step changes nothing at all. Called by the training step and the checkpoint.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from astraflow.recipe import OptimizerSettings
from astraflow_trainer.model.model import PolicyModel, local_part


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleSettings:
    """Linear warm-up, then constant, or linear decay to `final_fraction` at `decay_steps`, where it stays."""

    warmup_steps: int = 5
    decay_steps: int = 0
    """Steps of the whole schedule; 0 is constant."""
    final_fraction: float = 0.1

    def factor(self, step: int) -> float:
        """Fraction of the peak learning rate at `step`, from 0; the warm-up never yields 0."""
        warmup = min(1.0, (step + 1) / max(1, self.warmup_steps))
        if not self.decay_steps:
            return warmup
        left = 1.0 - min(1.0, step / self.decay_steps)
        return warmup * (self.final_fraction + (1.0 - self.final_fraction) * left)


class MasterOptimizer:
    """Updates a policy model through fp32 masters.

    The model may be sharded or not; masters and moments are laid out like its parameters.
    """

    def __init__(self, policy: PolicyModel, *, settings: OptimizerSettings) -> None:
        self._policy = policy
        self._settings = settings
        self._schedule = ScheduleSettings(warmup_steps=settings.warmup_steps)
        self.num_steps = 0
        """Steps taken; discarded ones do not count."""
        self.changed_learning_rate: float | None = None
        """The peak that an operator set; None while the settings' own is in force."""
        self._parameters = dict(policy.hf_parameters())
        self.masters = self._parameters
        """fp32 masters by Hugging Face name; sharded as the parameters are."""
        if not policy.holds_masters:
            self.masters = {
                name: nn.Parameter(parameter.detach().to(torch.float32, copy=True))
                for name, parameter in self._parameters.items()
            }
        self._adam = torch.optim.AdamW(
            _groups(self.masters, weight_decay=settings.weight_decay),
            lr=settings.learning_rate,
            betas=(settings.beta1, settings.beta2),
            eps=settings.eps,
            fused=True,
        )
        self._write_rounded()

    @property
    def learning_rate(self) -> float:
        """Learning rate of the next step."""
        return self._settings.learning_rate * self._schedule.factor(self.num_steps)

    @property
    def peak_learning_rate(self) -> float:
        """Peak of the schedule that is in force."""
        return self._settings.learning_rate

    def set_learning_rate(self, peak: float) -> None:
        """Change the peak from the next step on. Raises ValueError when negative or not finite."""
        if not (math.isfinite(peak) and peak >= 0):
            raise ValueError(f"learning rate {peak} must be finite and at least 0")
        self._settings = self._settings.model_copy(update={"learning_rate": peak})
        self.changed_learning_rate = peak

    def gradient_norm(self) -> float:
        """Euclidean norm of the accumulated gradient over all ranks; a collective when sharded."""
        gradients = [parameter.grad for parameter in self._parameters.values() if parameter.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)

    def step(self, *, gradient_norm: float) -> None:
        """Clip by `gradient_norm` (from that method), update masters, write them rounded to the model."""
        self._take_gradients(scale=min(1.0, self._settings.grad_clip / (gradient_norm + 1e-6)))
        for group in self._adam.param_groups:
            group["lr"] = self.learning_rate
        self._adam.step()
        self._adam.zero_grad(set_to_none=True)
        self.num_steps += 1
        self._write_rounded()

    def discard(self) -> None:
        """Forget the accumulated gradient; masters, moments and schedule stay as they are."""
        for parameter in self._parameters.values():
            parameter.grad = None

    def state(self) -> dict[str, torch.Tensor]:
        """Masters and moments by flat name, for a checkpoint; the tensors themselves, not copies.

        Moments that do not exist yet (before the first step) are created as zeros, so that the names never
        change.
        """
        self._create_moments()
        state: dict[str, torch.Tensor] = {}
        for name, master in self.masters.items():
            moments = self._adam.state[master]
            state[f"master.{name}"] = master
            state[f"exp_avg.{name}"] = moments["exp_avg"]
            state[f"exp_avg_sq.{name}"] = moments["exp_avg_sq"]
        return state

    def restored(self, *, num_steps: int, learning_rate: float | None = None) -> None:
        """Take over after `state()`'s tensors were overwritten in place by those of a checkpoint, with the peak
        that an operator had set, if one had.
        """
        self.num_steps = num_steps
        if learning_rate is not None:
            self.set_learning_rate(learning_rate)
        for master in self.masters.values():
            self._adam.state[master]["step"].fill_(num_steps)
        self._write_rounded()

    @torch.no_grad()
    def adopt(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Set the weights of this rank to these, flat bfloat16 by parameter, bit for bit (a NaN stays some NaN).

        A master that rounds to its weight already keeps what it has beyond bf16.
        """
        for name, wanted in weights.items():
            master = local_part(self.masters[name]).view(-1)
            differ = master.to(torch.bfloat16).view(torch.int16) != wanted.view(torch.int16)
            master[differ] = wanted[differ].to(torch.float32)
        self._write_rounded()

    def _take_gradients(self, *, scale: float) -> None:
        for name, parameter in self._parameters.items():
            gradient, parameter.grad = parameter.grad, None
            if gradient is not None and scale < 1.0:
                local_part(gradient).mul_(scale)
            self.masters[name].grad = gradient

    @torch.no_grad()
    def _write_rounded(self) -> None:
        if not self._policy.holds_masters:
            for name, parameter in self._parameters.items():
                local_part(parameter).copy_(local_part(self.masters[name]).to(torch.bfloat16))
        # A forward pass without backward leaves the outermost group gathered; it would go on serving old
        # weights.
        self._policy.gathered_no_more()

    def _create_moments(self) -> None:
        for master in self.masters.values():
            moments = self._adam.state[master]
            if not moments:
                moments["step"] = torch.tensor(float(self.num_steps), device=local_part(master).device)
                moments["exp_avg"] = torch.zeros_like(master, memory_format=torch.preserve_format)
                moments["exp_avg_sq"] = torch.zeros_like(master, memory_format=torch.preserve_format)


def _groups(masters: Mapping[str, nn.Parameter], *, weight_decay: float) -> list[dict[str, object]]:
    matrices = [master for master in masters.values() if master.ndim >= 2]
    vectors = [master for master in masters.values() if master.ndim < 2]
    return [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
