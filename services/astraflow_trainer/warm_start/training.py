"""Supervised warm start: gives a model built from numbers something that reinforcement learning can select
from.

Owns pre-tokenising, the supervised loop and the cache of its results. Invariant: the weights depend on the
examples, the settings and the seed only; the number of threads changes nothing, not even the last bit,
because a batch is always cut into the same shards, each computed on one thread, and their gradients are added
in order. Called before a run starts.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from astraflow_trainer.batches.packing import MicroBatch
from astraflow_trainer.model.model import PolicyModel
from astraflow_trainer.model.optimizer import ScheduleSettings

_ENCODE_CHUNK = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One demonstration as text; the loss covers `completion` and the end token after it."""

    prompt: str
    """Chat template applied, generation prompt added."""
    completion: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmStartSettings:
    """AdamW with linear warm-up and linear decay to a hundredth."""

    steps: int
    batch_size: int = 32
    """Examples per step."""
    learning_rate: float = 3e-3
    """Peak."""
    warmup_steps: int = 20
    final_fraction: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.98
    weight_decay: float = 0.01
    grad_clip: float = 1.0
    num_shards: int = 4
    """Pieces of a batch, by length: less padding, and what threads share out. Part of the result's
    definition.
    """

    def __post_init__(self) -> None:
        if self.steps < 1 or self.batch_size < 1 or self.num_shards < 1:
            raise ValueError(
                f"steps {self.steps}, batch_size {self.batch_size} and num_shards {self.num_shards} "
                f"must each be at least 1"
            )

    @property
    def num_examples(self) -> int:
        """Examples that the whole warm start consumes."""
        return self.steps * self.batch_size


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EncodedExamples:
    """Examples as token ids, end to end."""

    token_ids: NDArray[np.int64]
    """int64[sum of lengths]: prompt, completion, end token."""
    starts: NDArray[np.int64]
    """int64[E + 1]: where each example begins; the last entry is the total."""
    prompt_lengths: NDArray[np.int64]
    """int64[E]."""

    def __len__(self) -> int:
        return len(self.prompt_lengths)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """int64[E]: tokens of each example."""
        return np.diff(self.starts)


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmStartReport:
    """How the warm start went."""

    losses: tuple[float, ...]
    """Mean negative log-prob per completion token, at each step."""
    num_tokens: int
    """Tokens computed, padding excluded."""


def encode_examples(examples: Iterable[Example], *, tokenizer: PreTrainedTokenizerFast) -> EncodedExamples:
    """Tokenise in bulk. Prompt and completion are tokenised apart, as they are when the model samples."""
    end = tokenizer.eos_token_id
    pieces: list[list[int]] = []
    prompt_lengths: list[int] = []
    for chunk in _batched(examples, size=_ENCODE_CHUNK):
        prompts = _encode([example.prompt for example in chunk], tokenizer=tokenizer)
        completions = _encode([example.completion for example in chunk], tokenizer=tokenizer)
        for prompt, completion in zip(prompts, completions, strict=True):
            pieces.append([*prompt, *completion, end])
            prompt_lengths.append(len(prompt))
    lengths = np.fromiter(map(len, pieces), dtype=np.int64, count=len(pieces))
    return EncodedExamples(
        token_ids=np.fromiter(
            itertools.chain.from_iterable(pieces), dtype=np.int64, count=int(lengths.sum())
        ),
        starts=np.concatenate([[0], lengths.cumsum()]),
        prompt_lengths=np.asarray(prompt_lengths, dtype=np.int64),
    )


def warm_start(
    causal_lm: PreTrainedModel,
    *,
    examples: EncodedExamples,
    settings: WarmStartSettings,
    num_threads: int = 1,
    progress: Callable[[int, float], None] | None = None,
) -> WarmStartReport:
    """Train `causal_lm` in place on `settings.num_examples` examples, in order.

    `progress` is called after each step with its number (from 1) and loss. Raises ValueError when there are
    too few examples, and FloatingPointError when the loss is no longer finite.
    """
    if len(examples) < settings.num_examples:
        raise ValueError(
            f"{settings.steps} steps of {settings.batch_size} need {settings.num_examples} examples, "
            f"got {len(examples)}"
        )
    policy = PolicyModel(causal_lm).train()
    learner = _Learner(policy, settings=settings)
    losses: list[float] = []
    with _workers(num_threads) as map_shards:
        for step in range(settings.steps):
            shards = _shards(examples, step=step, settings=settings)
            loss = learner.step(shards, map_shards=map_shards)
            losses.append(loss)
            if progress is not None:
                progress(step + 1, loss)
    num_tokens = int(examples.lengths[: settings.num_examples].sum())
    return WarmStartReport(losses=tuple(losses), num_tokens=num_tokens)


MapShards = Callable[
    [Callable[[MicroBatch], tuple[torch.Tensor, list[torch.Tensor]]], list[MicroBatch]],
    Iterator[tuple[torch.Tensor, list[torch.Tensor]]],
]


class _Learner:
    def __init__(self, policy: PolicyModel, *, settings: WarmStartSettings) -> None:
        self._policy = policy
        self._settings = settings
        self._parameters = list(policy.parameters())
        self._schedule = ScheduleSettings(
            warmup_steps=settings.warmup_steps,
            shape="linear",
            decay_steps=settings.steps,
            final_fraction=settings.final_fraction,
        )
        self._num_steps = 0
        self._adam = torch.optim.AdamW(
            self._parameters,
            lr=settings.learning_rate,
            betas=(settings.beta1, settings.beta2),
            weight_decay=settings.weight_decay,
            fused=True,
        )

    def step(self, shards: list[MicroBatch], *, map_shards: MapShards) -> float:
        num_targets = sum(len(shard.target_N) for shard in shards)
        total = torch.zeros(())
        for loss, gradients in map_shards(self._gradients, shards):
            total = total + loss
            for parameter, gradient in zip(self._parameters, gradients, strict=True):
                parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
        loss_mean = float(total) / num_targets
        if not np.isfinite(loss_mean):
            raise FloatingPointError(
                f"the loss of step {self._num_steps + 1} is {loss_mean}; "
                f"lower learning_rate {self._settings.learning_rate}"
            )
        self._update(scale=1.0 / num_targets)
        return loss_mean

    def _gradients(self, shard: MicroBatch) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Summed negative log-prob of a shard and its gradient; touches no shared state."""
        loss = -self._policy.score(shard).logprob_N.sum()
        return loss.detach(), list(torch.autograd.grad(loss, self._parameters))

    def _update(self, *, scale: float) -> None:
        gradients = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        torch._foreach_mul_(gradients, scale)
        torch.nn.utils.clip_grad_norm_(self._parameters, self._settings.grad_clip)
        for group in self._adam.param_groups:
            group["lr"] = self._settings.learning_rate * self._schedule.factor(self._num_steps)
        self._adam.step()
        self._adam.zero_grad(set_to_none=True)
        self._num_steps += 1


@contextmanager
def _workers(num_threads: int) -> Iterator[MapShards]:
    """An in-order map over shards; one thread per shard at a time, one core per thread.

    Threads over shards beat threads inside operators: at this size an operator takes microseconds, and its
    threads would spin for each other whenever another process needs a core.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        if num_threads == 1:
            yield map
        else:
            with ThreadPoolExecutor(num_threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
                yield pool.map
    finally:
        torch.set_num_threads(before)


def _shards(examples: EncodedExamples, *, step: int, settings: WarmStartSettings) -> list[MicroBatch]:
    first = step * settings.batch_size
    batch = np.arange(first, first + settings.batch_size)
    longest_first = batch[np.argsort(-examples.lengths[batch], kind="stable")]
    pieces = np.array_split(longest_first, min(settings.num_shards, settings.batch_size))
    return [_shard(examples, chosen) for chosen in pieces]


def _shard(examples: EncodedExamples, chosen: NDArray[np.int64]) -> MicroBatch:
    """One example per lane, padded to the longest of the shard."""
    lengths = examples.lengths[chosen]
    width = int(lengths.max())
    columns = np.arange(width)
    present = columns < lengths[:, None]
    token_ids = np.zeros(present.shape, dtype=np.int64)
    token_ids[present] = np.concatenate(
        [examples.token_ids[slice(*examples.starts[i : i + 2])] for i in chosen]
    )
    targets = np.flatnonzero(present & (columns >= examples.prompt_lengths[chosen][:, None]))
    return MicroBatch(
        token_ids_BL=torch.from_numpy(token_ids),
        position_ids_BL=torch.from_numpy(np.broadcast_to(columns, present.shape).copy()),
        document_ids_BL=torch.from_numpy(np.where(present, 0, -1)),
        source_N=torch.from_numpy(targets - 1),
        target_N=torch.from_numpy(token_ids.reshape(-1)[targets]),
        row_N=torch.from_numpy(chosen[targets // width]),
        behavior_logprob_N=torch.zeros(len(targets)),
        in_place_N=torch.zeros(len(targets), dtype=torch.bool),
        temperature_N=torch.ones(len(targets)),
        loss_weight_N=torch.ones(len(targets)),
        num_row_tokens=int(lengths.sum()),
    )


def _encode(texts: list[str], *, tokenizer: PreTrainedTokenizerFast) -> list[list[int]]:
    encodings = tokenizer.backend_tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    return [encoding.ids for encoding in encodings]


def _batched(examples: Iterable[Example], *, size: int) -> Iterator[list[Example]]:
    iterator = iter(examples)
    while chunk := list(itertools.islice(iterator, size)):
        yield chunk
