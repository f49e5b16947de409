"""The tensors of every slot, and the passes that advance them: prefill for entering requests, decode for
the rest.

Invariant: for an occupied slot, `positions` is where its last token will be written, everything below
it is in the cache, and the prefix index names only rows computed under the weights that `runner` holds now.
Called by `core.py` on the scheduler thread; it decides nothing about who runs.

Shape legend: B rows of a pass, N new tokens, D hidden.
"""

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np
import torch

from astraflow_engine.adapters import Adapter, RowAdapters
from astraflow_engine.kv_cache import KvCache
from astraflow_engine.model import Decoder
from astraflow_engine.model_config import ModelConfig
from astraflow_engine.prefix_cache import PrefixIndex
from astraflow_engine.sampling import RowSampling, SamplingSlots
from astraflow_engine.scheduler import Sequence
from astraflow_engine.weights import Weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """One token drawn for one slot."""

    slot: int
    token: int
    logprob: float


@dataclass(slots=True, kw_only=True)
class _Prompt:
    """One distinct context to prefill, and every slot that will hold it."""

    tokens: list[int]
    space: str
    start: int
    """Everything below is in the first slot's cache."""
    slots: list[int] = field(default_factory=list)

    @property
    def num_missing(self) -> int:
        return len(self.tokens) - self.start

    @property
    def is_ready(self) -> bool:
        """Only the last token is missing, and the next decode pass computes that."""
        return self.num_missing == 1


class ModelRunner:
    """Model, cache and per-slot state of one engine. Not thread-safe."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        *,
        num_slots: int,
        capacity: int,
        pass_tokens: int,
    ) -> None:
        self._weights = weights
        self._model = Decoder(config, num_positions=capacity)
        self._cache = KvCache(config, num_slots=num_slots, capacity=capacity)
        self._prefixes = PrefixIndex(num_rows=num_slots, capacity=capacity)
        self._sampling = SamplingSlots(num_slots)
        self._pass_tokens = pass_tokens
        self._last_tokens = torch.zeros(num_slots, dtype=torch.int64)
        self._positions = torch.zeros(num_slots, dtype=torch.int64)
        self._adapters: list[Adapter | None] = [None] * num_slots

    def enter(
        self, sequences: Iterable[Sequence], *, free_slots: Seq[int]
    ) -> tuple[dict[int, Sequence], list[Draw]]:
        """Choose a slot for each sequence, compute what no row holds yet, and draw the next token of those.

        Returns the sequences by their slots. Those that have no draw wait for the next decode pass: all but their last
        token was held, so it costs them no pass of their own.
        """
        free = list(free_slots)
        prompts: dict[tuple[str, tuple[int, ...]], _Prompt] = {}
        by_slot: dict[int, Sequence] = {}
        for sequence in sequences:
            context = sequence.context
            key = (sequence.cache_space, tuple(context))
            if key not in prompts:
                prompts[key] = self._settle(context, space=key[0], free=free)
                num_reused = prompts[key].start
            else:
                slot = self._prefixes.least_valuable(free)
                free.remove(slot)
                prompts[key].slots.append(slot)
                num_reused = len(context) - prompts[key].is_ready
            self._assign(sequence, slot=prompts[key].slots[-1], num_reused=num_reused)
            by_slot[prompts[key].slots[-1]] = sequence
        for prompt in prompts.values():
            if prompt.is_ready:
                self._hold(prompt, length=prompt.start)
        missing = [prompt for prompt in prompts.values() if not prompt.is_ready]
        return by_slot, self._prefill(missing) if missing else []

    def decode(self, slots: Seq[int]) -> list[Draw]:
        """Advance the occupied slots, given in ascending order, by one token each."""
        rows = torch.tensor(slots)
        positions = self._positions[rows]
        hidden = self._model.decode(
            self._weights,
            self._cache,
            tokens_B=self._last_tokens[rows],
            positions_B=positions,
            rows_B=rows,
            length=int(positions.max()) + 1,
            adapters=RowAdapters(self._adapters[slot] for slot in slots),
        )
        return self._draw(hidden, slots=slots)

    def leave(self, slot: int, sequence: Sequence) -> None:
        """`sequence` gave its slot up; what it computed stays reusable when all of it is of the current
        weights."""
        if sequence.uniform_kv and sequence.tokens:
            # The token drawn last has not been through the model.
            self._prefixes.record(slot, tokens=sequence.context[:-1], space=sequence.cache_space)
        elif not sequence.uniform_kv:
            self._prefixes.forget(slot)
        self._vacate(slot)

    def discard(self, slot: int) -> None:
        """Empty a slot whose numbers are not finite; nothing of it stays."""
        self._prefixes.forget(slot)
        self._cache.clear_row(slot)
        self._vacate(slot)

    def exchange(self, first: int, second: int) -> None:
        """Swap everything two slots hold."""
        pair = [first, second]
        length = max(int(self._positions[pair].max()), *(self._prefixes.length(slot) for slot in pair))
        self._cache.exchange_rows(first, second, length=length)
        self._prefixes.exchange(first, second)
        self._sampling.exchange(first, second)
        for state in (self._last_tokens, self._positions):
            state[pair] = state[pair[::-1]]
        self._adapters[first], self._adapters[second] = self._adapters[second], self._adapters[first]

    def replace_weights(self, weights: Weights) -> None:
        """Serve other weights from the next pass on; nothing computed before is offered for reuse."""
        self._weights = weights
        self._prefixes.flush()

    def flush_prefixes(self) -> None:
        """Offer nothing computed so far for reuse."""
        self._prefixes.flush()

    def _vacate(self, slot: int) -> None:
        self._positions[slot] = 0
        self._adapters[slot] = None

    def _settle(self, context: list[int], *, space: str, free: list[int]) -> _Prompt:
        """Take a free row for a new context, holding as much of its prefix as any row has."""
        match = self._prefixes.best_match(context, space=space)
        in_place = match is not None and match.row in free
        slot = match.row if match is not None and in_place else self._prefixes.least_valuable(free)
        free.remove(slot)
        shared = match.length if match is not None else 0
        if match is not None and not in_place:
            self._cache.copy_row(match.row, targets=[slot], length=shared)
        self._prefixes.record(slot, tokens=context[:shared], space=space)
        return _Prompt(tokens=context, space=space, start=shared, slots=[slot])

    def _assign(self, sequence: Sequence, *, slot: int, num_reused: int) -> None:
        params = sequence.request.params
        row = RowSampling(
            temperature=params.temperature, top_p=params.top_p, top_k=params.top_k, seed=sequence.seed
        )
        self._sampling.assign(slot, row, num_drawn=len(sequence.tokens))
        self._adapters[slot] = sequence.adapter
        sequence.uniform_kv = True
        if not sequence.tokens:
            sequence.cached_tokens = num_reused

    def _prefill(self, prompts: list[_Prompt]) -> list[Draw]:
        hidden_BD = self._compute(prompts)
        slots: list[int] = []
        sources: list[int] = []
        for index, prompt in enumerate(prompts):
            self._hold(prompt, length=len(prompt.tokens))
            slots += prompt.slots
            sources += [index] * len(prompt.slots)
        return self._draw(hidden_BD[torch.tensor(sources)], slots=slots)

    def _hold(self, prompt: _Prompt, *, length: int) -> None:
        """All slots of a prompt hold `length` of its tokens, and stand at its last one."""
        self._cache.copy_row(prompt.slots[0], targets=prompt.slots[1:], length=length)
        for slot in prompt.slots:
            self._prefixes.record(slot, tokens=prompt.tokens[:length], space=prompt.space)
            self._last_tokens[slot] = prompt.tokens[-1]
            # `_draw` moves every drawn row on by one.
            self._positions[slot] = len(prompt.tokens) - 1

    def _compute(self, prompts: list[_Prompt]) -> torch.Tensor:
        """Run every prompt's missing tokens, a bounded number per pass; the hidden state of each last
        token."""
        last: list[torch.Tensor | None] = [None] * len(prompts)
        # Neighbours of similar length pad each other least.
        pending = sorted(range(len(prompts)), key=lambda index: prompts[index].num_missing)
        while pending:
            chosen, width = self._next_pass([prompts[index].num_missing for index in pending])
            rows = [prompts[index] for index in pending[:chosen]]
            hidden_BND = self._extend(rows, width=width)
            for row, index in enumerate(pending[:chosen]):
                num_done = min(prompts[index].num_missing, width)
                prompts[index].start += num_done
                last[index] = hidden_BND[row, num_done - 1]
            pending = [index for index in pending if prompts[index].num_missing]
        return torch.stack([hidden for hidden in last if hidden is not None])

    def _next_pass(self, missing: list[int]) -> tuple[int, int]:
        """How many of the pending prompts share the next pass, and how many tokens each gets at most."""
        width = 0
        for count, num_missing in enumerate(missing):
            wider = max(width, min(num_missing, self._pass_tokens))
            if count and wider * (count + 1) > self._pass_tokens:
                return count, width
            width = wider
        return len(missing), width

    def _extend(self, prompts: list[_Prompt], *, width: int) -> torch.Tensor:
        """Hidden states [B, width, D] of the next tokens of each prompt; shorter rows are padded."""
        starts = torch.tensor([prompt.start for prompt in prompts])
        ends = [min(prompt.start + width, len(prompt.tokens)) for prompt in prompts]
        tokens = np.zeros((len(prompts), width), dtype=np.int64)
        for row, (prompt, end) in enumerate(zip(prompts, ends, strict=True)):
            tokens[row, : end - prompt.start] = prompt.tokens[prompt.start : end]
        positions = starts.unsqueeze(-1) + torch.arange(width)
        padding = positions >= torch.tensor(ends).unsqueeze(-1)
        return self._model.extend(
            self._weights,
            self._cache,
            tokens_BN=torch.from_numpy(tokens),
            positions_BN=positions.clamp(max=self._cache.capacity),
            write_at_BN=positions.masked_fill(padding, self._cache.capacity),
            rows_B=torch.tensor([prompt.slots[0] for prompt in prompts]),
            length=max(ends),
            adapters=RowAdapters(self._adapters[prompt.slots[0]] for prompt in prompts),
        )

    def _draw(self, hidden_BD: torch.Tensor, *, slots: Seq[int]) -> list[Draw]:
        tokens, logprobs = self._sampling.step(self._weights.head(hidden_BD), slots_B=np.asarray(slots))
        where = torch.tensor(slots)
        self._last_tokens[where] = tokens
        self._positions[where] += 1
        return [
            Draw(slot=slot, token=token, logprob=logprob)
            for slot, token, logprob in zip(slots, tokens.tolist(), logprobs.tolist(), strict=True)
        ]
