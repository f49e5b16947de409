"""Which request sits in which slot, and when waiting ones are let in: policy only, no tensors, no threads.

Invariant: every accepted request is in exactly one place (queue or one slot) until it is returned exactly
once as a `Sequence` to complete; requests enter in arrival order, retracted ones first; occupied slots stay
dense enough that a pass over the leading rows wastes at most a quarter of its work. Driven by `core.py`,
which owns the model; property tests drive it alone.
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from astraflow_engine.adapters import Adapter
from astraflow_engine.errors import InvalidRequest, QueueFull
from astraflow_engine.requests import Completion, Finish, FinishKind, GenerateRequest, VersionSpan

_DENSITY = 0.75


@dataclass(slots=True, kw_only=True, eq=False)
class Sequence:
    """A request in progress."""

    request: GenerateRequest
    seed: int
    arrived_s: float
    adapter: Adapter | None = None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    cached_tokens: int = 0
    num_retractions: int = 0
    uniform_kv: bool = True
    """All keys and values in its slot belong to the current weights, so others may reuse them."""
    _version_ends: list[tuple[str, int]] = field(default_factory=list)

    @property
    def context(self) -> list[int]:
        """Prompt and generated tokens: what a recomputation feeds."""
        return [*self.request.prompt, *self.tokens]

    @property
    def cache_space(self) -> str:
        """Keys and values are reused only within it: the request's, under this adapter alone."""
        return self.request.cache_space + (f"\0{self.adapter.serial}" if self.adapter else "")

    def note_version_end(self, version: str) -> None:
        """Tokens so far (beyond earlier notes) were drawn under `version`, later ones will not be."""
        if self.tokens:
            self._version_ends.append((version, len(self.tokens)))

    def complete(self, finish: Finish, *, version: str, now_s: float) -> Completion:
        """Freeze the sequence; `version` is the one its last tokens were drawn under."""
        return Completion(
            request=self.request,
            tokens=tuple(self.tokens),
            logprobs=tuple(self.logprobs),
            spans=_spans([*self._version_ends, (version, len(self.tokens))]),
            finish=finish,
            cached_tokens=self.cached_tokens,
            num_retractions=self.num_retractions,
            latency_s=now_s - self.arrived_s,
        )

    def finish_after_last_token(self, eos_token_ids: frozenset[int]) -> Finish | None:
        """Why the sequence ends with the token drawn last, or None when it goes on."""
        params, token = self.request.params, self.tokens[-1]
        if not params.ignore_eos and (token in eos_token_ids or token in params.stop_token_ids):
            return Finish(kind=FinishKind.STOP, matched_token=token)
        if len(self.tokens) >= params.max_new_tokens:
            return Finish(kind=FinishKind.LENGTH)
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionLimits:
    """When waiting requests are let in, and how many at once."""

    max_waiting: int
    max_prefill_tokens: int
    """Prompt tokens of one admission, padding included; one longer request is still let in alone."""
    max_held_steps: int = 8
    """Decode steps a request may wait beside a free slot so that several enter in one prefill."""


class SlotScheduler:
    """The queue and the slots. Not thread-safe: owned by the scheduler thread."""

    def __init__(self, *, num_slots: int, limits: AdmissionLimits) -> None:
        self._limits = limits
        self._waiting: deque[Sequence] = deque()
        self._slots: list[Sequence | None] = [None] * num_slots
        self.num_running = 0
        self._rids: set[str] = set()
        self._held_steps = 0

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def extent(self) -> int:
        """One more than the highest occupied slot; 0 when none is."""
        return max((slot + 1 for slot, _ in self.running()), default=0)

    def running(self) -> Iterator[tuple[int, Sequence]]:
        """Occupied slots in ascending order."""
        return ((slot, sequence) for slot, sequence in enumerate(self._slots) if sequence is not None)

    def live(self) -> Iterator[Sequence]:
        """Every accepted request that has not been returned."""
        yield from (sequence for _, sequence in self.running())
        yield from self._waiting

    def free_slots(self) -> list[int]:
        """Empty slots in ascending order."""
        return [slot for slot, sequence in enumerate(self._slots) if sequence is None]

    def submit(self, sequence: Sequence) -> None:
        """Queue a request. Raises QueueFull, or InvalidRequest when its rid is in use."""
        rid = sequence.request.rid
        if len(self._waiting) >= self._limits.max_waiting:
            raise QueueFull(
                f"the request queue is full: {len(self._waiting)} waiting, limit {self._limits.max_waiting}; "
                "send it again later or raise --max-queued-requests"
            )
        if rid in self._rids:
            raise InvalidRequest(f"rid {rid!r} is already in progress; give every request its own rid")
        self._rids.add(rid)
        self._waiting.append(sequence)

    def admit(self) -> list[Sequence]:
        """Take the requests that enter now, in order; the caller places each one. Empty while it pays to
        wait.

        Entering costs a pass of its own, so a few requests beside many running ones wait until several can
        enter together, at most `max_held_steps` calls.
        """
        num_free = len(self._slots) - self.num_running
        if not self._waiting or not num_free or not self._worth_entering(num_free):
            return []
        self._held_steps = 0
        return self._take(num_free)

    def place(self, sequence: Sequence, *, slot: int) -> None:
        """Put an admitted request into an empty slot."""
        assert self._slots[slot] is None, f"slot {slot} is occupied"
        self._slots[slot] = sequence
        self.num_running += 1

    def finish(self, slot: int) -> Sequence:
        """Empty a slot for good and hand its request over."""
        sequence = self._vacate(slot)
        self._rids.discard(sequence.request.rid)
        return sequence

    def remove(self, matches: Callable[[GenerateRequest], bool]) -> list[tuple[int | None, Sequence]]:
        """Take out every matching request for good, with the slot it held (None: it was waiting)."""
        running = [
            (slot, self.finish(slot)) for slot, sequence in list(self.running()) if matches(sequence.request)
        ]
        waiting = [sequence for sequence in self._waiting if matches(sequence.request)]
        self._waiting = deque(sequence for sequence in self._waiting if not matches(sequence.request))
        self._rids.difference_update(sequence.request.rid for sequence in waiting)
        return [*running, *((None, sequence) for sequence in waiting)]

    def retract_all(self) -> list[tuple[int, Sequence]]:
        """Send every running request back to the front of the queue, oldest arrival first."""
        retracted = [(slot, self._vacate(slot)) for slot, _ in list(self.running())]
        for _, sequence in retracted:
            sequence.num_retractions += 1
        self._waiting.extendleft(sorted((s for _, s in retracted), key=lambda s: s.arrived_s, reverse=True))
        return retracted

    def exchanges(self) -> Iterator[tuple[int, int]]:
        """Move the highest request into the lowest hole until the leading rows are dense; yields each pair
        moved.

        Tolerates a quarter of holes, since refilling one is free and a move is not.
        """
        while self.num_running < _DENSITY * self.extent:
            source, target = self.extent - 1, self._slots.index(None)
            self._slots[target], self._slots[source] = self._slots[source], None
            yield source, target

    def _worth_entering(self, num_free: int) -> bool:
        enough = min(len(self._waiting), max(1, len(self._slots) // 8))
        idle = num_free == len(self._slots)
        if idle or num_free >= enough or self._held_steps >= self._limits.max_held_steps:
            return True
        self._held_steps += 1
        return False

    def _take(self, num_free: int) -> list[Sequence]:
        taken: list[Sequence] = []
        prompts: set[tuple[int, ...]] = set()
        longest = 0
        while self._waiting and len(taken) < num_free:
            sequence = self._waiting[0]
            # Samples of one prompt share its prefill, so they cost its tokens once.
            prompts.add(sequence.request.prompt)
            longest = max(longest, len(sequence.request.prompt) + len(sequence.tokens))
            if taken and longest * len(prompts) > self._limits.max_prefill_tokens:
                break
            taken.append(self._waiting.popleft())
        return taken

    def _vacate(self, slot: int) -> Sequence:
        sequence = self._slots[slot]
        assert sequence is not None, f"slot {slot} is empty"
        self._slots[slot] = None
        self.num_running -= 1
        return sequence


def _spans(version_ends: list[tuple[str, int]]) -> tuple[VersionSpan, ...]:
    spans: list[VersionSpan] = []
    for version, end in version_ends:
        start = spans[-1].end if spans else 0
        if spans and end <= start:
            continue
        if spans and spans[-1].version == version:
            spans[-1] = VersionSpan(version=version, start=spans[-1].start, end=end)
        else:
            spans.append(VersionSpan(version=version, start=start, end=end))
    return tuple(spans)
