"""What this node serves of one policy at this moment: engines, version, tokenizer, and who needs that version.

Invariant: `version` is what every engine that takes calls really serves, so evaluation episodes pin it and a newer one
waits for them. State only: `engine_host` brings engines up, `weight_sync` changes versions, `session` samples.
"""

import asyncio
import math
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from pathlib import Path

from astraflow.errors import StateError
from astraflow_raas.engine.base import EngineUnavailable, GenerateCall, Generation
from astraflow_raas.engine.batcher import CallBatcher
from astraflow_raas.engine.replicas import Replica, Replicas
from astraflow_raas.policies.experts import ExpertLayers, read_expert_layers
from astraflow_raas.policies.tokenizer import Tokenizer, load_tokenizer
from astraflow_raas.policies.vocabulary import check_call, check_generation, read_vocab_size
from astraflow_raas.timeline import Timeline

_LINGER_S = 0.25
_MAX_REQUESTS = 4
"""In flight to one engine, of calls that may share them."""


class VersionUnavailable(StateError):
    """This node does not serve the version that an evaluation needs."""

    reason, code = "VERSION_UNAVAILABLE", "FAILED_PRECONDITION"


class ServedPolicy:
    """One policy of the run on this node. Owned by the event loop."""

    def __init__(
        self,
        policy_id: str,
        *,
        num_engines: int = 1,
        timeline: Timeline | None = None,
        patience_s: float = math.inf,
        records_experts: bool = False,
    ) -> None:
        """`patience_s` bounds how long calls wait for an engine, counted from the loss of the last one."""
        self.policy_id = policy_id
        self.is_needed = False
        """True once a workflow asked for it though its lease left it out, until an engine is ready again."""
        self.timeline = timeline or Timeline()
        """Where the stages of the node's start are noted."""
        self.on_change: Callable[[], None] = lambda: None
        """Called whenever an engine is ready, lost, or serves another version."""
        self.num_tokens = 0
        """Tokens sampled since the process started."""
        self._num_answers = 0
        self.is_moving_on = False
        """True while a newer version is about to take the place of the served one, which nobody may rely on then."""
        self._replicas = Replicas(
            policy_id, number=num_engines, patience_s=patience_s, on_change=self._engines_changed
        )
        self._batcher = CallBatcher(self._replicas, max_requests=_MAX_REQUESTS * num_engines)
        self._tokenizer: Tokenizer | None = None
        self._vocab_size = 0
        self._records_experts = records_experts
        self.experts: ExpertLayers | None = None
        """Its mixtures of experts, where what they choose is recorded."""
        self.num_pins = 0
        """Evaluation leases that need the version served now."""
        self.num_calls = 0
        """Calls waiting for an answer."""
        self._unpinned = asyncio.Event()
        self._unpinned.set()
        self._unpinned_s = -math.inf

    @property
    def tokenizer(self) -> Tokenizer:
        """The policy's tokenizer. Raises EngineUnavailable before the first weights arrived."""
        if self._tokenizer is None:
            raise EngineUnavailable(f"policy {self.policy_id!r} has no weights on this node yet")
        return self._tokenizer

    @property
    def engines(self) -> tuple[Replica, ...]:
        """Its engines, those that are lost at the moment too."""
        return self._replicas.all

    @property
    def is_served(self) -> bool:
        """Whether an engine takes calls."""
        return bool(self._replicas.in_service)

    @property
    def version(self) -> int | None:
        """Version that the engines serve; None before the first."""
        return self._replicas.version

    @property
    def tokens_per_call(self) -> float:
        """Mean length of the answers so far; 0 before the first."""
        return self.num_tokens / max(1, self._num_answers)

    async def generate(self, call: GenerateCall, *, key: Hashable) -> Generation:
        """Sample one call; waits for an engine. Raises the errors of `engine.base`."""
        if self._vocab_size:
            check_call(call, vocab_size=self._vocab_size)
        self.num_calls += 1
        try:
            generation = await self._batcher.generate(call, key=key)
        finally:
            self.num_calls -= 1
        self.check(call, generation)
        self.num_tokens += len(generation.token_ids)
        self._num_answers += 1
        return generation

    def check(self, call: GenerateCall, generation: Generation) -> None:
        """Raises EngineFaulty for tokens that the model does not know."""
        if self._vocab_size:
            check_generation(call, generation, vocab_size=self._vocab_size)

    @contextmanager
    def pinned(self, version: int) -> Iterator[None]:
        """Keep `version` in place while the block runs. Raises VersionUnavailable when it is not served
        now."""
        if self.version != version or not self.is_served or self.is_moving_on:
            serves = "nothing yet" if self.version is None else f"version {self.version}"
            raise VersionUnavailable(
                f"policy {self.policy_id!r}: version {version} is required, this node serves {serves}"
            )
        self.num_pins += 1
        self._unpinned.clear()
        try:
            yield
        finally:
            self.num_pins -= 1
            if not self.num_pins:
                self._unpinned_s = asyncio.get_running_loop().time()
                self._unpinned.set()

    async def wait_unpinned(self, *, deadline_s: float) -> bool:
        """Wait until evaluations need the served version no more; False when `deadline_s` passed first.

        Evaluation leases come in waves, so the version counts as needed for a moment after the last one
        ended.
        """
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(deadline_s):
                while self.num_pins or (rest_s := self._unpinned_s + _LINGER_S - loop.time()) > 0:
                    await (self._unpinned.wait() if self.num_pins else asyncio.sleep(rest_s))
        except TimeoutError:
            return False
        return True

    async def read_tokenizer(self, model_dir: Path) -> None:
        """Load tokenizer and vocabulary from the first weights; later versions share them. Raises RecipeError."""
        if self._tokenizer is None:
            self._vocab_size = await asyncio.to_thread(read_vocab_size, model_dir)
            if self._records_experts:
                self.experts = await asyncio.to_thread(read_expert_layers, model_dir)
            self._tokenizer = await asyncio.to_thread(load_tokenizer, model_dir)

    async def close(self) -> None:
        """Cancel calls in flight."""
        await self._batcher.close()

    def _engines_changed(self) -> None:
        if self.is_served:
            self.is_needed = False
        self.on_change()
