"""What this node serves of one policy at this moment: engine, version, tokenizer, and who needs that version.

Invariant: calls are only sent while an engine is ready; `version` is what that engine really serves, so
evaluation episodes pin it and a newer one waits for them. State only: `engine_host` brings engines up,
`weight_sync` changes versions, `session` samples.
"""

import asyncio
import math
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from pathlib import Path

from astraflow.errors import AstraflowError, StateError
from astraflow_kit.log import get_logger
from astraflow_raas.engine.base import Engine, EngineDown, EngineUnavailable, GenerateCall, Generation
from astraflow_raas.engine.batcher import CallBatcher
from astraflow_raas.policies.tokenizer import Tokenizer, load_tokenizer
from astraflow_raas.policies.vocabulary import check_call, check_generation, read_vocab_size
from astraflow_raas.timeline import Stage, Timeline

log = get_logger(__name__)

_LINGER_S = 0.25


class VersionUnavailable(StateError):
    """This node does not serve the version that an evaluation needs."""

    reason, code = "VERSION_UNAVAILABLE", "FAILED_PRECONDITION"


class ServedPolicy:
    """One policy of the run on this node. Owned by the event loop."""

    def __init__(
        self, policy_id: str, *, timeline: Timeline | None = None, patience_s: float = math.inf
    ) -> None:
        """`patience_s` bounds how long calls wait for an engine, counted from the loss of the last one."""
        self.policy_id = policy_id
        self._patience_s = patience_s
        self._lost_s = math.inf
        self.is_needed = False
        """True once a workflow asked for it though its lease left it out, until an engine is ready again."""
        self.timeline = timeline or Timeline()
        """Where the stages of the node's start are noted."""
        self.on_change: Callable[[], None] = lambda: None
        """Called whenever the policy is served, lost, or served at another version."""
        self.version: int | None = None
        """Version the engine serves; None before the first."""
        self.num_tokens = 0
        """Tokens sampled since the process started."""
        self._num_answers = 0
        self.changing = asyncio.Lock()
        """Held while an engine starts or swaps weights, so that the two never meet."""
        self.last_answer_s = 0.0
        """Loop time of the last sign that the engine makes tokens: an answer to a call or to a probe."""
        self._engine: Engine | None = None
        self._ready = asyncio.Event()
        self._batcher = CallBatcher(self._ready_engine)
        self._tokenizer: Tokenizer | None = None
        self._vocab_size = 0
        self._doubt: AstraflowError | None = None
        self._num_pins = 0
        self._num_calls = 0
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
    def engine(self) -> Engine | None:
        """The engine, when one is ready."""
        return self._engine if self._ready.is_set() else None

    @property
    def num_calls(self) -> int:
        """Calls waiting for an answer."""
        return self._num_calls

    @property
    def tokens_per_call(self) -> float:
        """Mean length of the answers so far; 0 before the first."""
        return self.num_tokens / max(1, self._num_answers)

    @property
    def num_pins(self) -> int:
        """Evaluation leases that need the version served now."""
        return self._num_pins

    async def generate(self, call: GenerateCall, *, key: Hashable) -> Generation:
        """Sample one call; waits for an engine. Raises the errors of `engine.base`."""
        if self._vocab_size:
            check_call(call, vocab_size=self._vocab_size)
        if not self._num_calls:
            self.last_answer_s = asyncio.get_running_loop().time()
        self._num_calls += 1
        try:
            generation = await self._batcher.generate(call, key=key)
        finally:
            self._num_calls -= 1
        self.check(call, generation)
        self.last_answer_s = asyncio.get_running_loop().time()
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
        if self.version != version or not self._ready.is_set() or self.changing.locked():
            serves = "nothing yet" if self.version is None else f"version {self.version}"
            raise VersionUnavailable(
                f"policy {self.policy_id!r}: version {version} is required, this node serves {serves}"
            )
        self._num_pins += 1
        self._unpinned.clear()
        try:
            yield
        finally:
            self._num_pins -= 1
            if not self._num_pins:
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
                while self._num_pins or (rest_s := self._unpinned_s + _LINGER_S - loop.time()) > 0:
                    await (self._unpinned.wait() if self._num_pins else asyncio.sleep(rest_s))
        except TimeoutError:
            return False
        return True

    async def read_tokenizer(self, model_dir: Path) -> None:
        """Load tokenizer and vocabulary from the first weights; later versions share them. Raises RecipeError."""
        if self._tokenizer is None:
            self._vocab_size = await asyncio.to_thread(read_vocab_size, model_dir)
            self._tokenizer = await asyncio.to_thread(load_tokenizer, model_dir)

    def engine_ready(self, engine: Engine, *, version: int) -> None:
        """An engine serves `version`: calls flow."""
        self._engine, self.version, self._doubt = engine, version, None
        self._lost_s, self.is_needed = math.inf, False
        self._ready.set()
        self.timeline.mark(Stage.ENGINE_READY)
        self.on_change()

    def engine_lost(self) -> None:
        """The engine is gone: calls wait for the next one."""
        if self._ready.is_set():
            self._lost_s = asyncio.get_running_loop().time()
        self._ready.clear()
        self.on_change()

    def distrust(self, error: AstraflowError) -> None:
        """Nobody knows what the engine samples with: calls wait until its host has brought up the next one."""
        self._doubt = error
        self.engine_lost()

    def require_trust(self) -> None:
        """Raises the error for which the engine is not trusted."""
        if self._doubt is not None:
            raise self._doubt

    def serves(self, version: int) -> None:
        """The engine now serves `version`."""
        self.version = version
        self.on_change()

    async def close(self) -> None:
        """Cancel calls in flight."""
        await self._batcher.close()

    async def _ready_engine(self) -> Engine:
        while self._engine is None or not self._ready.is_set():
            until_s = self._lost_s + self._patience_s
            try:
                async with asyncio.timeout_at(until_s if math.isfinite(until_s) else None):
                    await self._ready.wait()
            except TimeoutError:
                down_s = asyncio.get_running_loop().time() - self._lost_s
                raise EngineDown(
                    f"policy {self.policy_id!r} has had no engine here for {down_s:.1f} s; the node starts another one"
                ) from None
        return self._engine
