"""Router replay: a mixture of experts computes with the experts that the engine chose, so that a rounding which would
choose others makes no other policy ("Stabilizing MoE reinforcement learning", R3, arXiv 2510.11370).

Invariant: only the choice is replayed. Gate weights are computed from the trainer's own router, at the recorded
experts, so its gradient flows; a pass without routing is the model's own, to the bit. Called by the policy model.
Shape legend: S positions of a pass, X mixture-of-experts layers, K experts of a token.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from astraflow_trainer.batches.routing import RouterShape

_KINDS = frozenset({"Qwen2MoeTopKRouter", "Qwen3MoeTopKRouter"})


class ExpertRouters:
    """The routers of one model, in the order of its layers."""

    def __init__(self, causal_lm: nn.Module) -> None:
        self.routed_SXK: torch.Tensor | None = None
        """int64: what the next pass and its backward replay; −1 leaves the choice to the router. None: nothing."""
        found: list[Any] = [module for module in causal_lm.modules() if type(module).__name__ in _KINDS]
        self.shape = RouterShape()
        if found:
            self.shape = RouterShape(
                num_layers=len(found), num_experts=found[0].num_experts, experts_per_token=found[0].top_k
            )
        for layer, router in enumerate(found):
            router.forward = partial(self._route, router, layer, router.forward)

    def _route(
        self,
        router: Any,  # noqa: ANN401 - transformers' modules
        layer: int,
        own: Callable[..., Any],
        hidden: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        if self.routed_SXK is None:
            result: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = own(hidden)
            return result
        logits = F.linear(hidden.reshape(-1, router.hidden_dim), router.weight)
        probabilities = torch.softmax(logits, dtype=torch.float, dim=-1)
        recorded = self.routed_SXK[:, layer]
        chosen = torch.where(recorded >= 0, recorded, probabilities.topk(router.top_k, dim=-1).indices)
        weights = probabilities.gather(-1, chosen)
        if router.norm_topk_prob:
            weights = weights / weights.sum(-1, keepdim=True)
        return logits, weights.to(logits.dtype), chosen
