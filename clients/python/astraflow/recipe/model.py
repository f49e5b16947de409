"""The `model` and `sampling` sections of a policy: where its weights, its tokenizer and a teacher come from, how tokens
are drawn.

Each setting is checked by itself here; what concerns several policies is checked by `settings`.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from astraflow.recipe.plugin_settings import PluginSettings
from astraflow.recipe.roles import PolicyName
from astraflow.recipe.section import Section

_ATTENTION = ("k_proj", "o_proj", "q_proj", "v_proj")
_ALL_LINEAR = tuple(sorted((*_ATTENTION, "down_proj", "gate_proj", "up_proj")))


class ArchitectureSettings(Section):
    """A model built from numbers instead of downloaded."""

    model_type: Literal["llama", "qwen2", "qwen3"] = "qwen3"
    """Architecture family: dense models that trainer, CPU engine and SGLang compute alike."""
    hidden_size: int = Field(ge=8, le=65_536)
    """Width of the residual stream."""
    num_hidden_layers: int = Field(ge=1, le=512)
    """Number of transformer blocks."""
    num_attention_heads: int = Field(ge=1, le=1024)
    """Query heads per block."""
    num_key_value_heads: int = Field(ge=1, le=1024)
    """Key/value heads per block; divides num_attention_heads."""
    head_dim: int = Field(ge=2, le=1024)
    """Width of one head; even."""
    intermediate_size: int = Field(ge=8, le=1_048_576)
    """Width of the feed-forward block."""
    max_position_embeddings: int = Field(default=512, ge=16, le=10_485_760)
    """Longest sequence, prompt included."""
    rope_theta: float = Field(default=10_000.0, gt=0)
    """Base of the rotary embedding."""
    tie_word_embeddings: bool = True
    """Whether the output layer shares the embedding's weights."""
    initializer_range: float = Field(default=0.02, gt=0, le=1)
    """Standard deviation of the initial weights."""

    @model_validator(mode="after")
    def _heads_divide(self) -> ArchitectureSettings:
        heads, groups = self.num_attention_heads, self.num_key_value_heads
        if heads % groups:
            raise ValueError(
                f"num_attention_heads {heads} is not a multiple of num_key_value_heads {groups} "
                f"(remainder {heads % groups}); choose num_key_value_heads among the divisors of {heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim {self.head_dim} is odd; rotary embedding needs an even width")
        if self.model_type == "llama" and self.hidden_size % heads:
            raise ValueError(
                f"hidden_size {self.hidden_size} of a llama model is not a multiple of num_attention_heads {heads} "
                f"(remainder {self.hidden_size % heads}); choose num_attention_heads among the divisors of "
                f"{self.hidden_size}"
            )
        return self


class TokenizerSettings(Section):
    """A byte-level BPE tokenizer trained on the demonstrations."""

    from_policy: PolicyName | None = None
    """Take the tokenizer that this policy trains on its demonstrations; the other keys are then those of that policy.
    """
    vocab_size: int = Field(default=512, ge=260, le=1_000_000)
    """Upper bound of the vocabulary, special tokens included."""
    num_texts: int = Field(default=2000, ge=1, le=10_000_000)
    """Demonstrations read to train it."""


class WarmStartSettings(Section):
    """Supervised steps that give reinforcement learning something to select from. Cached in the data dir."""

    demonstrations: PluginSettings
    """`Demonstrations` plug-in: called with a seed, yields examples."""
    steps: int = Field(ge=1, le=10_000_000)
    """Supervised optimizer steps."""
    batch_size: int = Field(default=32, ge=1, le=65_536)
    """Examples per step."""
    learning_rate: float = Field(default=3e-3, gt=0, le=1)
    """Peak learning rate; 20 warm-up steps, then linear to a hundredth."""


class ExternalSettings(Section):
    """A model behind an OpenAI-compatible endpoint, for a policy that is only asked, and for its text only. Where the
    endpoint is, and its key, are settings of nodes.
    """

    model: str = Field(min_length=1, max_length=256)
    """Name of the model at the endpoint."""
    max_concurrent_calls: int = Field(default=16, ge=1, le=4096)
    """Calls that one node makes at once; others wait."""
    timeout_s: float = Field(default=30.0, gt=0, le=3600)
    """Time one attempt of a call may take."""
    max_attempts: int = Field(default=4, ge=1, le=100)
    """Attempts of a call while the endpoint is busy, failing or out of reach."""


class SnapshotSettings(Section):
    """A past version of a trained policy, for a policy that is only asked: give `version` or `every_versions`."""

    of: PolicyName
    """The trained policy."""
    version: int | None = Field(default=None, ge=0, le=2_097_151)
    """Always this version; version 0 until there is it."""
    every_versions: int = Field(default=0, ge=0, le=2_097_151)
    """Each multiple of this joins the pool, and another member of the pool is drawn then."""
    keep: int = Field(default=1, ge=1, le=256)
    """Size of the pool: its newest members. 1: always the newest."""
    draw: Literal["uniform", "rating"] = "uniform"
    """Each member alike, or by rating: p · (1 − p), with p what the trained policy is expected to score against it."""
    result: str = Field(default="win", min_length=1, max_length=128)
    """Metric of episodes that ratings are by: what the trained policy scored, 1 won, 0.5 drawn, 0 lost."""

    @model_validator(mode="after")
    def _one_rule(self) -> SnapshotSettings:
        if (self.version is None) == (self.every_versions == 0):
            raise ValueError(
                f"a snapshot has version {self.version} and every_versions {self.every_versions}; give `version`, "
                "which stays, or `every_versions` of at least 1"
            )
        if self.version is not None and self.keep > 1:
            raise ValueError(f"keep {self.keep} is for a pool; give `every_versions` instead of `version`")
        return self


class StoredVersionSettings(Section):
    """A weight version of another run, in its store. `astraflow runs fork` writes it."""

    store: str = Field(pattern=r"^(file|s3)://\S+$", max_length=1024)
    """The other run's store; trainers read it with the credentials of their own."""
    run: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")
    """The other run."""
    policy: PolicyName
    """Its policy."""
    version: int = Field(ge=0, lt=2**21)
    """The version; pinned there, or it may be collected before a trainer has it."""
    step: int | None = Field(default=None, ge=0)
    """The step after which the policy had these weights; a checkpoint of it has the optimizer that belongs to them."""
    manifest_sha256: str | None = Field(default=None, pattern=r"^[0-9a-f]{64}$")
    """Digest of the version's manifest; what the store has under that number is refused when it is another."""


class ReferenceModel(Section):
    """A frozen model to compare with, a teacher too: give one key. Its vocabulary holds the policy's."""

    path: str | None = None
    """A Hugging Face model directory or hub name."""
    version: int | None = Field(default=None, ge=0, le=2_097_151)
    """A version of this policy in the run's store. It must be there when the trainer starts, which then keeps it."""
    from_version: StoredVersionSettings | None = None
    """A version of another run, in its store."""
    warm_start: WarmStartSettings | None = None
    """A model that is built and warm-started as the policy's own is, with its tokenizer, on other demonstrations."""
    architecture: ArchitectureSettings | None = None
    """What `warm_start` builds; as the policy's own where it is left out."""

    @model_validator(mode="after")
    def _one_source(self) -> ReferenceModel:
        sources = ("path", "version", "from_version", "warm_start")
        given = [name for name in sources if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(
                f"a reference has {', '.join(given) or 'nothing'}; give exactly one of `path`, `version` (of this "
                "policy), `from_version` (of another run) and `warm_start` (a model to build)"
            )
        if self.architecture is not None and self.warm_start is None:
            raise ValueError(
                "`architecture` is of a reference that is built; give `warm_start`, or take it out"
            )
        return self

    def require_buildable(self, model: ModelSettings) -> None:
        """Raise ValueError where it is to be built with the tokenizer of a policy whose model is not built."""
        if self.warm_start and model.architecture is None:
            raise ValueError(
                "kl.reference.warm_start builds a model with the tokenizer that this policy trains, and it trains "
                "none; give `path`, or build the policy from `architecture`"
            )


class LoraSettings(Section):
    """A LoRA adapter of another policy's model, arXiv 2106.09685. It alone is trained and published, and served by the
    engine of that policy.
    """

    of: PolicyName
    """The policy whose model it adapts; that one needs `train: false`, and no role."""
    rank: int = Field(default=16, ge=1, le=1024)
    """Rank of the matrices that are added."""
    alpha: float = Field(default=32.0, gt=0, le=65_536)
    """What is added is scaled by alpha / rank."""
    target_modules: Literal["all-linear", "attention"] = "all-linear"
    """All linear layers but the output head, or those of attention only."""

    @property
    def modules(self) -> tuple[str, ...]:
        """The layers by their names in a decoder block, sorted."""
        return _ATTENTION if self.target_modules == "attention" else _ALL_LINEAR


class ModelSettings(Section):
    """Where the initial weights come from: exactly one of `path`, `architecture`, `from_policy`, `from_version`,
    `lora`, `snapshot` and `external`.
    """

    path: str | None = None
    """A Hugging Face model directory or hub name."""
    from_policy: PolicyName | None = None
    """Start with the weights and the tokenizer that this policy starts with."""
    from_version: StoredVersionSettings | None = None
    """Start with the weights and the tokenizer of a version of another run."""
    lora: LoraSettings | None = None
    """An adapter of the model of a policy that is not trained."""
    snapshot: SnapshotSettings | None = None
    """Past versions of a policy that is trained. Needs `train: false`."""
    external: ExternalSettings | None = None
    """No weights: ask an endpoint. Needs `train: false`."""
    architecture: ArchitectureSettings | None = None
    """Build the model from numbers."""
    tokenizer: TokenizerSettings | None = None
    """Train a tokenizer; needed with `architecture`."""
    warm_start: WarmStartSettings | None = None
    """Supervised steps before reinforcement learning; needed with `architecture`."""

    @model_validator(mode="after")
    def _one_source(self) -> ModelSettings:
        own = self.path, self.architecture, self.from_version
        sources = (*own, self.from_policy, self.lora, self.snapshot, self.external)
        if sources.count(None) != len(sources) - 1:
            raise ValueError(
                "give exactly one of `path` (a model to load), `architecture` (a model to build), `from_policy` "
                "(another policy's), `from_version` (another run's), `lora` (an adapter of another policy's), "
                "`snapshot` (another policy's past versions) and `external` (an endpoint)"
            )
        missing = [name for name in ("tokenizer", "warm_start") if getattr(self, name) is None]
        if self.architecture is not None and missing:
            raise ValueError(
                f"a model built from `architecture` also needs "
                f"{' and '.join(f'`{name}`' for name in missing)}"
            )
        if self.path is not None and self.tokenizer is not None:
            raise ValueError("`tokenizer` trains a new one and cannot be combined with `path`; remove it")
        names = ("from_policy", "from_version", "lora", "snapshot", "external")
        elsewhere = next((name for name in names if getattr(self, name) is not None), "")
        if elsewhere and (self.tokenizer or self.warm_start):
            raise ValueError(f"with `{elsewhere}` there is nothing to prepare here; remove the other keys")
        return self


class SamplingSettings(Section):
    """How the policy samples during rollout."""

    temperature: float = Field(default=1.0, ge=0, le=10)
    """Softmax temperature; 0 is greedy (allowed for evaluation-only policies)."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus mass."""
    top_k: int = Field(default=0, ge=0)
    """Number of candidates; 0 means all."""
    max_new_tokens: int = Field(default=256, ge=1, le=1_048_576)
    """Upper bound of new tokens per call."""
    accept_sampling_bias: bool = False
    """Let a trained policy be sampled with `top_p` or `top_k`. Its log-probs are those of all candidates, as if nothing
    had been cut: ratios to them are biased, by the probability that was cut.
    """

    def parameters(self) -> dict[str, Any]:
        """What `rollout.v1.SamplingParams` has."""
        return self.model_dump(exclude={"accept_sampling_bias"})

    def require_trainable(self, place: str) -> None:
        """Raise ValueError where ratios to what was sampled would be biased, and nobody has accepted that."""
        if (self.top_p < 1 or self.top_k > 0) and not self.accept_sampling_bias:
            raise ValueError(
                f"{place}: top_p {self.top_p:g} and top_k {self.top_k} cut candidates off, but log-probs, and so the "
                "ratios that are trained on, are those of all of them; leave both out, or accept the bias with "
                "`accept_sampling_bias: true`"
            )
