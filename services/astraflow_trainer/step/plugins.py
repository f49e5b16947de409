"""The recipe's own loss and advantage, called so that whatever they do wrong names them.

Invariant: what they return has one number per token or row. Made when a trainer starts; called by the training step and
by the loss kernel.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from astraflow.errors import PluginError
from astraflow.plugins import Advantage, Loss, RewardedRows, TrainedTokens
from astraflow.recipe.advantage import AdvantageSettings, AnyAdvantage
from astraflow.recipe.algorithm import AlgorithmSettings
from astraflow.recipe.plugin_settings import PluginSettings
from astraflow_kit.plugins import RAISED, RecipeSource, describe, make


@dataclass(frozen=True)
class PluginLoss:
    """A `Loss` under its name in the recipe."""

    name: str
    loss: Loss

    def of(self, tokens: TrainedTokens) -> torch.Tensor:
        """float32[N]: the loss of each token. Raises PluginError."""
        try:
            result: object = self.loss(tokens)
        except RAISED as error:
            raise PluginError(f"loss plug-in {self.name!r} raised {describe(error)}") from error
        wanted = tokens.logprob.shape
        if not isinstance(result, torch.Tensor) or result.shape != wanted or not result.requires_grad:
            found = "no gradient" if getattr(result, "shape", None) == wanted else _shape(result)
            raise PluginError(
                f"loss plug-in {self.name!r} must return float32[{len(tokens.logprob)}], one loss per token with a "
                f"gradient to `tokens.logprob`; it has {found}"
            )
        return result


@dataclass(frozen=True)
class PluginAdvantage:
    """An `Advantage` under its name in the recipe."""

    name: str
    advantage: Advantage

    def of(
        self, rewards: NDArray[np.float64], *, groups: Sequence[int], lengths: Sequence[int]
    ) -> NDArray[np.float64]:
        """float64[N]: the advantage of each row. Raises PluginError."""
        rows = RewardedRows(rewards=rewards.tolist(), groups=list(groups), lengths=list(lengths))
        try:
            result = np.asarray(self.advantage(rows), dtype=np.float64)
        except RAISED as error:
            raise PluginError(f"advantage plug-in {self.name!r} raised {describe(error)}") from error
        if result.shape != rewards.shape or not np.isfinite(result).all():
            raise PluginError(
                f"advantage plug-in {self.name!r} must return {len(rewards)} finite numbers, one per row; it has "
                f"{_shape(result)}, {np.count_nonzero(~np.isfinite(result))} of them not finite"
            )
        return result


@dataclass(frozen=True, kw_only=True)
class StepPlugins:
    """What of an algorithm is the recipe's own, None is one of ours; and the advantages of single roles."""

    advantage: PluginAdvantage | None = None
    loss: PluginLoss | None = None
    advantage_of_role: Mapping[str, AdvantageSettings | PluginAdvantage] = field(default_factory=dict)
    """Where a role has an advantage of its own."""

    @classmethod
    def made(
        cls,
        algorithm: AlgorithmSettings,
        *,
        source: RecipeSource,
        roles: Mapping[str, AnyAdvantage | PluginSettings] | None = None,
    ) -> "StepPlugins":
        """Make what the algorithm and the `roles` name. Raises PluginError."""
        advantage, loss, own_loss = _advantage(algorithm.advantage, source=source), algorithm.loss, None
        if isinstance(loss, PluginSettings):
            own_loss = PluginLoss(loss.use, make(loss, protocol=Loss, source=source))
        return cls(
            advantage=advantage if isinstance(advantage, PluginAdvantage) else None,
            loss=own_loss,
            advantage_of_role={
                role: _advantage(given, source=source) for role, given in (roles or {}).items()
            },
        )


def _advantage(
    given: AnyAdvantage | PluginSettings, *, source: RecipeSource
) -> AdvantageSettings | PluginAdvantage:
    if isinstance(given, PluginSettings):
        return PluginAdvantage(given.use, make(given, protocol=Advantage, source=source))
    return given


def _shape(result: object) -> str:
    shape = getattr(result, "shape", None)
    return type(result).__name__ if shape is None else f"shape {tuple(shape)}"
