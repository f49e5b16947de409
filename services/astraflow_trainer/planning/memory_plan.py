"""How much memory a rank needs to train a model, from its configuration and the settings alone.

Invariant: nothing is allocated for it, and each figure says how it comes about, so that what does not fit can be
refused with the arithmetic. Figures are those of the rank that holds most. Called by `astraflow trainer --plan`, and
by a trainer before it loads anything onto a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Literal

import torch

from astraflow.errors import InvalidArgumentError
from astraflow_trainer.model.logprobs import chunk_tokens_of
from astraflow_trainer.model.model import CriticModel, PolicyModel, empty_of
from astraflow_trainer.model.quantized import BLOCK
from astraflow_trainer.planning.activations import activations_of
from astraflow_trainer.ranks.mesh import require_mesh

if TYPE_CHECKING:
    import transformers

    from astraflow.recipe import TrainerSettings
    from astraflow_trainer.model.sharding import Placement

Memory = Literal["device", "host"]
_GATHERED_LAYERS = 2
"""The one that is computed, and the next one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One use of memory of a rank."""

    name: str
    memory: Memory
    num_bytes: int
    arithmetic: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLayout:
    """On what is trained."""

    num_ranks: int = 1
    num_replicas: int = 1
    on_gpu: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """The uses of memory of the rank that needs most; without a GPU all of them are the host's."""

    items: Sequence[Item]
    num_parameters: int
    ranks: RankLayout

    def total(self, memory: Memory) -> int:
        """Bytes of one kind of memory, at the peak of a step."""
        return sum(item.num_bytes for item in self.items if item.memory == memory)

    def require_room(self, num_bytes: int, *, memory: Memory) -> None:
        """Raise InvalidArgumentError, with the arithmetic, where a rank has less memory than it needs."""
        items, needed = [item for item in self.items if item.memory == memory], self.total(memory)
        if needed <= num_bytes:
            return
        uses = " + ".join(
            f"{item.name} {size_of(item.num_bytes)} ({item.arithmetic})" for item in items if item.num_bytes
        )
        raise InvalidArgumentError(
            f"{self.num_parameters:,} parameters on {self.ranks.num_ranks} ranks need {size_of(needed)} of {memory} "
            f"memory a rank, and it has {size_of(num_bytes)}: {uses}. Take more ranks, lower "
            "trainer.tokens_per_microbatch, set trainer.gradient_sync to micro_batch, "
            "ASTRAFLOW_ACTIVATION_CHECKPOINTING to full, or ASTRAFLOW_OFFLOAD to true"
        )


def size_of(num_bytes: float) -> str:
    """As people read it."""
    if num_bytes >= 2**30:
        return f"{num_bytes / 2**30:,.2f} GiB"
    return f"{num_bytes / 2**20:.1f} MiB"


def memory_plan(
    config: transformers.PreTrainedConfig,
    training: TrainerSettings,
    *,
    ranks: RankLayout,
    placement: Placement,
    snapshot: Memory = "device",
    only_state: bool = False,
) -> MemoryPlan:
    """Of a model that is trained whole. Raises InvalidArgumentError for replicas that the ranks cannot be cut into.

    With `only_state` what a step needs beside the state is left out, which takes no forward pass to find.
    """
    num_shards = require_mesh(num_ranks=ranks.num_ranks, num_replicas=ranks.num_replicas)
    sizes = _Sizes.of(config, num_shards=num_shards)
    planner = _Planner(sizes, training, ranks, placement, snapshot)
    items = [*planner.state(), *planner.publishing()]
    if training.algorithm.critic is not None:
        of_critic = _Sizes.of(config, num_shards=num_shards, critic=True)
        items += _Planner(of_critic, training, ranks, placement, snapshot).critic()
    if training.algorithm.kl is not None and training.algorithm.kl.needs_model:
        items.append(planner.reference())
    if not only_state:
        items += [*planner.gathered(), *planner.step(config)]
    return MemoryPlan(items=items, num_parameters=sizes.num_parameters, ranks=ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sizes:
    """Of a model and of its parts, in parameters."""

    num_shards: int
    num_parameters: int
    shard: int
    """Of the first rank, whose part is the largest: FSDP cuts by rows, rounded up."""
    layer: int
    rest: int
    """Outside the layers: embedding, head, last norm."""
    remembered: Mapping[str, float]
    """Bytes of a rank for what the optimizer remembers, by its kind."""
    vocabulary: int
    width: int
    num_layers: int

    @classmethod
    def of(cls, config: transformers.PreTrainedConfig, *, num_shards: int, critic: bool = False) -> _Sizes:
        kind = CriticModel if critic else PolicyModel
        policy = kind(empty_of(config, dtype=torch.float32))
        layers = policy.causal_lm.get_decoder().layers
        parameters = dict(policy.hf_parameters())
        total = sum(parameter.numel() for parameter in parameters.values())
        in_layers = sum(parameter.numel() for parameter in layers.parameters())
        head = policy.causal_lm.get_output_embeddings().weight
        ends = {id(head), id(policy.causal_lm.get_input_embeddings().weight)}
        shards = {name: _shard(parameter.shape, num_shards) for name, parameter in parameters.items()}
        kinds = {name: (item.ndim, id(item) in ends, item.shape[-1]) for name, item in parameters.items()}
        return cls(
            num_shards=num_shards,
            num_parameters=total,
            shard=sum(shards.values()),
            layer=max(sum(parameter.numel() for parameter in layer.parameters()) for layer in layers),
            rest=total - in_layers,
            remembered={
                kind: sum(_remembered(kind, *kinds[name]) * count for name, count in shards.items())
                for kind in ("adamw", "adamw_8bit", "muon")
            },
            vocabulary=head.shape[0],
            width=head.shape[1],
            num_layers=len(layers),
        )


def _shard(shape: Sequence[int], num_shards: int) -> int:
    return -(-shape[0] // num_shards) * prod(shape[1:])


def _remembered(kind: str, num_axes: int, is_end: bool, columns: int) -> float:  # noqa: FBT001 - a row of a table
    """Bytes for each weight that `updates` keeps between steps."""
    if num_axes < 2 or kind == "adamw" or (kind == "muon" and is_end):
        return 8
    return 4 if kind == "muon" else 2 + 8 * -(-columns // BLOCK) / columns


@dataclass(frozen=True, slots=True)
class _Planner:
    sizes: _Sizes
    training: TrainerSettings
    ranks: RankLayout
    placement: Placement
    snapshot: Memory
    device: Memory = field(init=False)
    kept_on: Memory = field(init=False)
    """Where masters, moments and gradients are."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "device", "device" if self.ranks.on_gpu else "host")
        offloaded = self.placement.offload or not self.ranks.on_gpu
        object.__setattr__(self, "kept_on", "host" if offloaded else "device")

    @property
    def width_bytes(self) -> int:
        """Of a number that is computed with."""
        return 2 if self.placement.compute == "bf16" else 4

    def state(self) -> list[Item]:
        shard, remembered = self.sizes.shard, self.sizes.remembered[self.training.optimizer.kind]
        items = [self._of_shard("masters", 4), self._of_shard("gradient", 4)]
        if self.placement.compute == "fp32":
            items.append(self._of_shard("weights", 4))
        if self.training.optimizer.average is not None:
            items.append(self._of_shard("average", 4))
        arithmetic = f"{remembered / shard:.3g} B × {shard:,} ({self.training.optimizer.kind})"
        moments = Item(
            name="moments",
            memory=self.kept_on,
            num_bytes=int(remembered),
            arithmetic=arithmetic,
        )
        return [*items, moments]

    def critic(self) -> list[Item]:
        """State of a critic, whose parameters are its masters. Its passes and the policy's take turns."""
        count = self.sizes.shard
        moments = self.sizes.remembered[self.training.optimizer.kind] / count
        return [
            self._of_shard("critic's masters", 4),
            self._of_shard("critic's gradient", 4),
            self._of_shard("critic's moments", moments),
            self._of_shard("critic's checkpoint", 4 + moments, memory="host"),
        ]

    def reference(self) -> Item:
        """The frozen model of a KL term, where that is of the policy's size."""
        return self._of_shard("reference", self.width_bytes)

    def publishing(self) -> list[Item]:
        """The copy to compare with, buffers of versions on their way, and a checkpoint that is being written."""
        buffers = self.training.publish.max_behind + 2
        staged = 4 + self.sizes.remembered[self.training.optimizer.kind] / self.sizes.shard
        items = [
            self._of_shard("versions", 2 * buffers, memory="host"),
            self._of_shard("checkpoint", staged, memory="host"),
        ]
        if self.ranks.on_gpu:
            memory: Memory = "device" if self.snapshot == "device" else "host"
            items.append(self._of_shard("last version", 2, memory=memory))
        return items

    def gathered(self) -> list[Item]:
        """Whole groups of weights while they are computed with, and gradients before ranks have added them up."""
        sizes, layers = self.sizes, min(_GATHERED_LAYERS, self.sizes.num_layers)
        count = sizes.rest + layers * sizes.layer
        largest = max(sizes.rest, sizes.layer)
        every = self.training.gradient_sync == "micro_batch"
        unreduced = largest if every else largest + max(0, sizes.num_parameters - sizes.shard)
        of = "largest group" if every else f"largest group + all − shard of {sizes.shard:,}"
        return [
            self._item(
                "gathered weights",
                self.width_bytes * count,
                f"{self.width_bytes} B × ({sizes.rest:,} + {layers} layers of {sizes.layer:,})",
            ),
            self._item("gradient, not yet reduced", 4 * unreduced, f"4 B × {unreduced:,} ({of})"),
        ]

    def step(self, config: transformers.PreTrainedConfig) -> list[Item]:
        """What a micro-batch keeps between its forward and its backward pass, and the logits of a chunk."""
        sizes, tokens = self.sizes, self.training.tokens_per_microbatch
        dtype = torch.bfloat16 if self.placement.compute == "bf16" else torch.float32
        kept = activations_of(config, dtype=dtype, recompute=self.placement.recompute)
        per_token = sizes.num_layers * kept.layer + kept.others
        items = [
            self._item(
                "activations",
                int(per_token * tokens),
                f"{tokens:,} tokens × ({sizes.num_layers} layers × {kept.layer:,.0f} B + {kept.others:,.0f}), "
                f"checkpointing {self.placement.recompute}",
            )
        ]
        # The head is done with when the first layer is computed again.
        logits, again = self._logits(tokens), int(kept.layer_again * tokens)
        if again > logits.num_bytes:
            return [
                *items,
                self._item("a layer computed again", again, f"{tokens:,} tokens × {kept.layer_again:,.0f} B"),
            ]
        return [*items, logits]

    def _logits(self, tokens: int) -> Item:
        """Of a chunk, its probabilities, and the gradient of the head, which is added up in fp32."""
        words, width = self.sizes.vocabulary, self.sizes.width
        chunk, each = min(tokens, chunk_tokens_of(words, on_gpu=self.ranks.on_gpu)), 8
        of_head = 6 if self.width_bytes == 2 else 4
        return self._item(
            "logits of a chunk",
            each * chunk * words + of_head * words * width,
            f"{each} B × {chunk:,} tokens × {words:,} words + {of_head} B × the head's {words * width:,}",
        )

    def _of_shard(self, name: str, each: float, *, memory: Memory | None = None) -> Item:
        count = self.sizes.shard
        return Item(
            name=name,
            memory=memory or self.kept_on,
            num_bytes=int(each * count),
            arithmetic=f"{each:.3g} B × {count:,}",
        )

    def _item(self, name: str, num_bytes: int, arithmetic: str) -> Item:
        return Item(name=name, memory=self.device, num_bytes=num_bytes, arithmetic=arithmetic)
