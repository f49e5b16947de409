"""The policy model: a Hugging Face causal language model, scored on packed micro-batches and sharded with
FSDP2.

Owns building, loading and the forward pass; `sharding` lays it over ranks. Invariant: what the forward pass reads is
exactly what is published, bf16 values. Computed in fp32 the parameters hold them, and the fp32 masters live with the
optimizer (`optimizer.py`), which writes rounded copies back after each step: trainer and sampler agree to about 1e-5 in
log-prob. Computed in bf16 the parameters are the masters. Scores are CPU tensors whatever the device of the model: so
is all that follows from them, until the gradient goes back. Called by the training step, the warm start and the
publisher.
"""

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from safetensors.torch import save_file
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from astraflow_trainer.batches.packing import MicroBatch, attention_mask
from astraflow_trainer.model.attention import Kernel, pieces, use_kernel
from astraflow_trainer.model.logprobs import token_scores
from astraflow_trainer.model.routers import ExpertRouters

_PREFIX = "causal_lm."
_ADAPTER_NAME = ".default."
"""What peft writes into the names of parameters, and leaves out of those in files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A dense model built from numbers. Field names and meaning are those of its config.json."""

    model_type: str = "qwen3"
    """`llama`, `qwen2` or `qwen3`."""
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    max_position_embeddings: int = 512
    rope_theta: float = 10_000.0
    tie_word_embeddings: bool = True
    initializer_range: float = 0.02
    eos_token_id: int | None = None
    pad_token_id: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenScores:
    """Of the N trained tokens of one micro-batch."""

    logprob_N: torch.Tensor
    """float32, natural log, at the row's temperature; differentiable."""
    entropy_N: torch.Tensor
    """float32, nats; differentiable."""


class PackedModel(nn.Module):
    """A decoder that reads packed micro-batches: what a policy and its critic have in common.

    With several rows in a lane attention gets a block-diagonal causal mask, else none; a kernel for pieces gets the
    rows' borders instead.
    """

    def __init__(self, causal_lm: transformers.PreTrainedModel) -> None:
        super().__init__()
        self.causal_lm = causal_lm
        self.device = next(causal_lm.parameters()).device
        """Where the forward pass runs; sharded parameters may be kept elsewhere."""
        self.holds_masters = False
        """Whether the parameters are the fp32 masters, which are rounded when they are gathered."""
        self.compiler: str | None = None
        """The backend of torch that compiles what is done with logits; None where nothing is compiled."""
        self._attends_to_pieces = False

    def attend_by(self, name: str, kernel: Kernel) -> None:
        """Attend within rows by `kernel` from now on, without masks."""
        use_kernel(self.causal_lm, kernel, name=name)
        self._attends_to_pieces = True

    def hidden(
        self,
        token_ids_BL: torch.Tensor,
        *,
        position_ids_BL: torch.Tensor | None,
        attention_mask_B1LL: torch.Tensor | None,
        source_N: torch.Tensor,
        **attention: Any,
    ) -> torch.Tensor:
        """Hidden states [N, D] of the positions that predict the trained tokens. Arguments are those of `asked`."""
        output = self.causal_lm.get_decoder()(
            input_ids=token_ids_BL,
            position_ids=position_ids_BL,
            attention_mask=attention_mask_B1LL,
            use_cache=False,
            **attention,
        )
        hidden_ND: torch.Tensor = output.last_hidden_state.flatten(0, 1)[source_N]
        return hidden_ND

    def asked(self, batch: MicroBatch) -> dict[str, Any]:
        """What `hidden` reads of a micro-batch, moved to the device, once."""
        # Without a mask the model derives positions itself; restarting ones would make it look for packed
        # rows.
        by_pieces = self._attends_to_pieces
        packed = by_pieces or not batch.one_row_per_lane
        masked = packed and not by_pieces
        return {
            "token_ids_BL": self.moved(batch.token_ids_BL),
            "position_ids_BL": self.moved(batch.position_ids_BL) if packed else None,
            "attention_mask_B1LL": attention_mask(self.moved(batch.document_ids_BL)) if masked else None,
            "source_N": self.moved(batch.source_N),
            **(pieces(batch.document_ids_BL).arguments(self.moved) if by_pieces else {}),
        }

    def moved(self, values: torch.Tensor) -> torch.Tensor:
        """`values` on the device; from pinned memory the copy is not waited for. FSDP may have moved them already."""
        crosses = self.device.type == "cuda" and values.device.type == "cpu"
        pinned = values.pin_memory() if crosses else values
        return pinned.to(self.device, non_blocking=True)

    @property
    def attention_tokens(self) -> float:
        """Length of a lane at which attention costs as much as everything else: 4·L·d of 24·d² multiplications a token
        and layer, with d the width of the model. Infinite where attention costs the same in any lane.
        """
        if self._attends_to_pieces:
            return math.inf
        return 6.0 * int(self.causal_lm.config.get_text_config().hidden_size)

    def gathered_no_more(self) -> None:
        """Drop what a forward pass without a backward one leaves gathered on this rank."""
        if isinstance(self, FSDPModule):
            self.reshard()

    def sync_gradients(self, *, now: bool) -> None:
        """Say whether the next backward pass adds its gradient, and what earlier ones kept, up over the ranks; until
        then a rank keeps the gradient of the whole model.
        """
        if isinstance(self, FSDPModule):
            self.set_requires_gradient_sync(now)

    def hf_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Trained parameters under the names of a Hugging Face checkpoint, or of a peft adapter; tied ones once, under
        the embedding's name.
        """
        for name, parameter in self.named_parameters():
            if parameter.requires_grad:
                yield name.removeprefix(_PREFIX).replace(_ADAPTER_NAME, "."), parameter


class PolicyModel(PackedModel):
    """A causal language model that answers one question: how likely are the trained tokens of a micro-batch.

    Only these tokens reach the output head, in chunks, so logits are never held whole. In training, a mixture of
    experts replays the experts that a micro-batch brings; a reference, which is not trained, chooses for itself.
    """

    def __init__(self, causal_lm: transformers.PreTrainedModel) -> None:
        super().__init__(causal_lm)
        self.routers = ExpertRouters(causal_lm)

    def forward(
        self, *, target_N: torch.Tensor, temperature_N: torch.Tensor, **asked: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probs and entropies, float32[N] each. Arguments are fields of `MicroBatch` and those of `hidden`; see
        `score`.
        """
        hidden_ND = self.hidden(**asked)
        head_VD = self.causal_lm.get_output_embeddings().weight
        return token_scores(
            hidden_ND,
            head_VD=head_VD,
            target_N=target_N,
            temperature_N=temperature_N,
            compiler=self.compiler,
        )

    def score(self, batch: MicroBatch) -> TokenScores:
        """Score a micro-batch; a collective when the model is sharded over several ranks. Moves the scores back."""
        routed = batch.routed_BLXK if self.training else None
        self.routers.routed_SXK = None if routed is None else self.moved(routed.flatten(0, 1))
        logprob_N, entropy_N = self(
            target_N=self.moved(batch.target_N),
            temperature_N=self.moved(batch.temperature_N),
            **self.asked(batch),
        )
        return TokenScores(logprob_N=logprob_N.cpu(), entropy_N=entropy_N.cpu())

    def next_token_logprobs(self, token_ids_BL: torch.Tensor, *, last: int) -> torch.Tensor:
        """Natural log-probs float32[B, last, V] of the token that follows each of the last positions, at temperature 1.

        Rows are of equal length. Holds these logits whole: for a few positions. A collective when the model is sharded
        over several ranks; call it without gradients.
        """
        self.routers.routed_SXK = None
        output = self.causal_lm.get_decoder()(input_ids=self.moved(token_ids_BL), use_cache=False)
        head_VD = self.causal_lm.get_output_embeddings().weight
        logits_BKV = (output.last_hidden_state[:, -last:] @ head_VD.T).float()
        return torch.log_softmax(logits_BKV, -1)

    @property
    def vocab_size(self) -> int:
        """Token ids that the model knows: 0 to this, exclusive."""
        return int(self.causal_lm.get_output_embeddings().weight.shape[0])


class CriticModel(PackedModel):
    """A causal language model whose head gives one number: what the rest of the row is worth, before each trained
    token. The head is zero at first. Computed with fp32 masters as parameters: no version is made of it.
    """

    def __init__(self, causal_lm: transformers.PreTrainedModel) -> None:
        """Put the head in place of the model's own, on its device."""
        weight = causal_lm.get_output_embeddings().weight
        head = nn.Linear(weight.shape[1], 1, bias=False, device=weight.device, dtype=weight.dtype)
        nn.init.zeros_(head.weight)
        causal_lm.config.tie_word_embeddings = False
        causal_lm.set_output_embeddings(head)
        super().__init__(causal_lm)

    def forward(self, **asked: Any) -> torch.Tensor:
        """Values float32[N]; arguments are those of `hidden`."""
        # A sum of one: FSDP's hooks want no view.
        values: torch.Tensor = self.causal_lm.get_output_embeddings()(self.hidden(**asked)).float().sum(-1)
        return values

    def values(self, batch: MicroBatch) -> torch.Tensor:
        """float32[N] of a micro-batch's trained tokens, on the host; a collective when sharded over several ranks."""
        values: torch.Tensor = self(**self.asked(batch)).cpu()
        return values


def config_of(shape: ModelShape) -> transformers.PreTrainedConfig:
    """What transformers reads of a shape."""
    fields = asdict(shape)
    rope = {"rope_type": "default", "rope_theta": fields.pop("rope_theta")}
    return transformers.AutoConfig.for_model(**fields, rope_parameters=rope, bos_token_id=None)


def build_causal_lm(shape: ModelShape, *, seed: int) -> transformers.PreTrainedModel:
    """A model with random fp32 weights that depend on `shape` and `seed` only."""
    config = config_of(shape)
    with torch.random.fork_rng():
        torch.manual_seed(seed)

        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return cast("transformers.PreTrainedModel", model)


def load_causal_lm(directory: Path | str) -> transformers.PreTrainedModel:
    """A model from a Hugging Face directory (or hub name), with fp32 weights."""
    with _without_progress_bars():
        model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    return cast("transformers.PreTrainedModel", model)


def empty_causal_lm(
    directory: Path | str, *, dtype: torch.dtype = torch.float32
) -> transformers.PreTrainedModel:
    """The model of a Hugging Face directory without its weights: parameters on the meta device, buffers on the CPU."""
    return empty_of(transformers.AutoConfig.from_pretrained(directory), dtype=dtype)


def empty_of(config: transformers.PreTrainedConfig, *, dtype: torch.dtype) -> transformers.PreTrainedModel:
    """The model of a configuration, as `empty_causal_lm` has it."""
    with _parameters_without_memory():
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    return cast("transformers.PreTrainedModel", model)


@contextmanager
def _parameters_without_memory() -> Iterator[None]:
    """Each parameter moves to the meta device as a module takes it, before anything is written to it."""
    register = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        # One that is there already is tied to another module's.
        if parameter is not None and parameter.device.type != "meta":
            parameter = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
        register(module, name, parameter)

    nn.Module.register_parameter = on_meta  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def save_causal_lm(causal_lm: transformers.PreTrainedModel, directory: Path) -> None:
    """Write config and bf16 weights: what every process that loads them then agrees on to the bit."""
    weights = {
        name: parameter.detach().to(torch.bfloat16).contiguous()
        for name, parameter in causal_lm.named_parameters()
    }
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    config = copy.deepcopy(causal_lm.config)
    config.dtype = torch.bfloat16
    config.architectures = [type(causal_lm).__name__]
    config.save_pretrained(directory)
    if causal_lm.generation_config is not None:
        causal_lm.generation_config.save_pretrained(directory)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a sharded tensor, sharing its memory; the tensor itself when it is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@contextmanager
def _without_progress_bars() -> Iterator[None]:
    """Nothing but events goes to a daemon's output."""
    shown = transformers.utils.logging.is_progress_bar_enabled()
    transformers.utils.logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers.utils.logging.enable_progress_bar()
