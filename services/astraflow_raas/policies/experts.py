"""Which layers of a served model are mixtures of experts, and what an engine recorded of them.

Invariant: what leaves this module has one row of distinct, known experts for each layer that has a router, in the order
of the layers, as `Trajectory.expert_routing` wants them; SGLang 0.5.20 counts dense layers, too. Pure but for
`read_expert_layers`; called by `served_policy` and `policy_handle`.

Shape legend: S tokens, H layers of the model, X of them with experts, K experts of a token.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from astraflow.errors import RecipeError
from astraflow_raas.engine.base import EngineFaulty

MAX_EXPERTS = 65_536
"""Ids are written in two bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertLayers:
    """The mixtures of experts of one model."""

    num_layers: int
    """All layers, dense ones included."""
    with_experts: tuple[int, ...]
    """Those that have a router."""
    num_experts: int
    experts_per_token: int

    def read(self, recorded: bytes, *, rid: str) -> NDArray[np.unsignedinteger]:
        """[S, X, K] of a `Generation.experts`, in the smallest type that holds all ids. Raises EngineFaulty."""
        row = self.num_layers * self.experts_per_token
        experts = np.frombuffer(recorded, dtype="<i4")
        if not experts.size or experts.size % row:
            raise EngineFaulty(
                f"the experts of call {rid} are {experts.size} numbers, no multiple of {self.num_layers} layers × "
                f"{self.experts_per_token} experts"
            )
        routed_SXK = experts.reshape(-1, self.num_layers, self.experts_per_token)[:, self.with_experts]
        low, high = int(routed_SXK.min()), int(routed_SXK.max())
        ordered = np.sort(routed_SXK, axis=-1)
        if low < 0 or high >= self.num_experts or (ordered[..., 1:] == ordered[..., :-1]).any():
            raise EngineFaulty(
                f"the experts of call {rid} are from {low} to {high} of {self.num_experts}, or one of them twice"
            )
        return routed_SXK.astype(np.min_scalar_type(self.num_experts - 1))


def read_expert_layers(model_dir: Path) -> ExpertLayers:
    """From config.json, in the words of Qwen2-MoE and Qwen3-MoE. Raises RecipeError for a model without experts."""
    path = model_dir / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        num_layers, each = int(config["num_hidden_layers"]), int(config["num_experts_per_tok"])
        # transformers 5 writes the second name, Qwen's own files have the first.
        num_experts = int(config["num_experts"] if "num_experts" in config else config["num_local_experts"])
        every = int(config.get("decoder_sparse_step", 1))
        dense = frozenset(config.get("mlp_only_layers") or ())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RecipeError(
            f"{path} names no experts ({type(error).__name__}: {error}), and trainer.router_replay of the recipe "
            "records those of Qwen2-MoE and Qwen3-MoE; leave it out"
        ) from error
    with_experts = tuple(
        layer for layer in range(num_layers) if layer not in dense and not (layer + 1) % every
    )
    if not with_experts or not 0 < each <= num_experts <= MAX_EXPERTS:
        raise RecipeError(
            f"{path}: {each} of {num_experts} experts a token in {len(with_experts)} layers; trainer.router_replay of "
            f"the recipe needs 1 to {MAX_EXPERTS} experts in a layer at least; leave it out"
        )
    return ExpertLayers(
        num_layers=num_layers, with_experts=with_experts, num_experts=num_experts, experts_per_token=each
    )
