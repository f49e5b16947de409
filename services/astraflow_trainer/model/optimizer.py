"""The fp32 masters, and the rounding that keeps the model equal to what is published.

Owns the masters, their average and the learning-rate schedule; `updates` has the rules. Invariant: after construction,
a step or a restore, each model parameter equals its master rounded to bf16 (nearest, ties to even), or is the master,
of a model that rounds when it gathers; a discarded step changes nothing at all. Called by the training step and the
checkpoint.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from astraflow.recipe import OptimizerSettings
from astraflow_trainer.model.model import PackedModel, local_part
from astraflow_trainer.model.updates import updates_for


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleSettings:
    """Linear warm-up, and beside or after it what is left of the learning rate."""

    warmup_steps: int = 5
    shape: Literal["constant", "linear", "cosine"] = "constant"
    """A line or half a cosine from 1 at `decay_from` to `final_fraction` at `decay_steps`, where it stays."""
    decay_from: int = 0
    decay_steps: int = 0
    final_fraction: float = 0.1

    def factor(self, step: int) -> float:
        """Fraction of the peak learning rate at `step`, from 0; the warm-up never yields 0."""
        warmup = min(1.0, (step + 1) / max(1, self.warmup_steps))
        if self.shape == "constant":
            return warmup
        gone = (step - self.decay_from) / (self.decay_steps - self.decay_from)
        gone = min(1.0, max(0.0, gone))
        left = 1.0 - gone if self.shape == "linear" else 0.5 * (1.0 + math.cos(math.pi * gone))
        return warmup * (self.final_fraction + (1.0 - self.final_fraction) * left)


class MasterOptimizer:
    """Updates a policy model through fp32 masters.

    The model may be sharded or not; masters and moments are laid out like its parameters.
    """

    def __init__(self, policy: PackedModel, *, settings: OptimizerSettings) -> None:
        self._policy = policy
        self._settings = settings
        self._schedule = ScheduleSettings(
            warmup_steps=settings.warmup_steps,
            shape=settings.schedule,
            decay_from=settings.warmup_steps,
            decay_steps=settings.decay_steps,
            final_fraction=settings.final_fraction,
        )
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
        self._updates = updates_for(self.masters, settings, embeddings=_embeddings(policy))
        self._average = {
            name: master.detach().to(torch.float32, copy=True)
            for name, master in self.masters.items()
            if settings.average is not None
        }
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
        for update in self._updates:
            update.step(learning_rate=self.learning_rate)
        for master in self.masters.values():
            master.grad = None
        self.num_steps += 1
        self._follow()
        self._write_rounded()

    def discard(self) -> None:
        """Forget the accumulated gradient; masters, moments and schedule stay as they are."""
        for parameter in self._parameters.values():
            parameter.grad = None

    def state(self) -> dict[str, torch.Tensor]:
        """Masters, their average and moments by flat name, for a checkpoint; the tensors themselves, not copies.

        Its names never change.
        """
        state = {f"master.{name}": master.detach() for name, master in self.masters.items()}
        state |= {f"average.{name}": average for name, average in self._average.items()}
        for update in self._updates:
            state |= update.state()
        return state

    def restored(self, *, num_steps: int, learning_rate: float | None = None) -> None:
        """Take over after `state()`'s tensors were overwritten in place by those of a checkpoint, with the peak
        that an operator had set, if one had.
        """
        self.num_steps = num_steps
        if learning_rate is not None:
            self.set_learning_rate(learning_rate)
        for update in self._updates:
            update.restored(num_steps=num_steps)
        self._write_rounded()

    @torch.no_grad()
    def adopt(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Set the weights of this rank to these, flat bfloat16 by parameter, bit for bit (a NaN stays some NaN).

        A master that rounds to its weight already keeps what it has beyond bf16. An average begins anew with them.
        """
        for name, wanted in weights.items():
            master = local_part(self.masters[name]).view(-1)
            differ = master.to(torch.bfloat16).view(torch.int16) != wanted.view(torch.int16)
            master[differ] = wanted[differ].to(torch.float32)
            if name in self._average:
                local_part(self._average[name]).view(-1).copy_(master)
        self._write_rounded()

    @contextmanager
    def as_published(self) -> Iterator[None]:
        """While it lasts the model is what is published: the average where `average.publish` says so, rounded."""
        average = self._settings.average
        if average is None or not average.publish:
            yield
            return
        kept = {name: local_part(parameter).detach().clone() for name, parameter in self._parameters.items()}
        self._write_rounded(self._average)
        try:
            yield
        finally:
            self._write(kept)

    def _take_gradients(self, *, scale: float) -> None:
        for name, parameter in self._parameters.items():
            gradient, parameter.grad = parameter.grad, None
            if gradient is not None and scale < 1.0:
                local_part(gradient).mul_(scale)
            self.masters[name].grad = gradient

    @torch.no_grad()
    def _follow(self) -> None:
        """Move the average: a share of 1 - decay of each master, or what makes it the mean of the first few."""
        if self._settings.average is None:
            return
        share = 1.0 - min(self._settings.average.decay, self.num_steps / (self.num_steps + 1.0))
        for name, average in self._average.items():
            local_part(average).lerp_(local_part(self.masters[name]).detach(), share)

    @torch.no_grad()
    def _write_rounded(self, source: Mapping[str, torch.Tensor] | None = None) -> None:
        if source is None and self._policy.holds_masters:
            self._policy.gathered_no_more()
            return
        source = self.masters if source is None else source
        self._write({name: local_part(values).to(torch.bfloat16) for name, values in source.items()})

    @torch.no_grad()
    def _write(self, values: Mapping[str, torch.Tensor]) -> None:
        for name, parameter in self._parameters.items():
            local_part(parameter).copy_(values[name])
        # A forward pass without backward leaves the outermost group gathered; it would go on serving old
        # weights.
        self._policy.gathered_no_more()


def _embeddings(policy: PackedModel) -> set[str]:
    """Names of the trained input embedding and output head, which may be one."""
    lm = policy.causal_lm
    ends = {id(lm.get_input_embeddings().weight), id(lm.get_output_embeddings().weight)}
    return {name for name, parameter in policy.hf_parameters() if id(parameter) in ends}
