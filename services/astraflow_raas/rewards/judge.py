"""A ready-made reward: a judge, which is a policy of the run, reads the completion and says what it is worth.

Invariant: what the judge does wrong (no answer in time, no verdict, a refusal, an endpoint that fails, a budget that is
spent) has a name and follows the recipe's rule; an equal question to the same version of the judge is asked once. Named
by a recipe as `astraflow_raas.rewards.judge:Judge`; the recipe gives the role `judge` to a policy: one that is trained,
a frozen one, or an endpoint elsewhere.
"""

import asyncio
import hashlib
import re
from collections import OrderedDict
from collections.abc import Mapping
from typing import Literal

from astraflow.plugins import (
    GenerateResult,
    Message,
    MissingCapability,
    Policy,
    PolicyUnavailable,
    RewardFailed,
    RewardLimits,
    Score,
    TaskSpec,
)

ROLE = "judge"
_SHOWN_CHARS = 200
_BYTES_PER_TOKEN = 4


class JudgeFailed(Exception):
    """Why there is no verdict; `kind` is `timeout`, `garbage`, `refused`, `error` or `budget`."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"judge_{kind}: {message}")
        self.kind = kind


class Judge:
    """The number in the judge's last match of `verdict`, divided by `scale`.

    `prompt` may hold `{task}`, `{completion}` and `{answer}`, the task's `data["answer"]`. `words` are verdicts that
    are no numbers: `{yes: 1, no: 0}`. `on_failure` is `fail` or the reward without a verdict. `max_calls` and
    `max_tokens` bound what this node asks in its life, 0 is no bound. Metrics: `judged`, `judge_cached` and
    `judge_` with the kind of failure.
    """

    roles = (ROLE,)
    limits = RewardLimits(timeout_s=3600.0)  # each call of the judge has `timeout_s`

    def __init__(
        self,
        *,
        prompt: str,
        verdict: str = r"(?i)score:\s*(-?[0-9.]+)",
        scale: float = 1.0,
        words: Mapping[str, float] | None = None,
        bounds: tuple[float, float] = (0.0, 1.0),
        refusal: str = r"(?i)\bI (?:can(?:no|')t|am unable|won't)\b",
        attempts: int = 2,
        timeout_s: float = 60.0,
        concurrency: int = 16,
        max_calls: int = 0,
        max_tokens: int = 0,
        cache_entries: int = 10_000,
        on_failure: Literal["fail"] | float = "fail",
    ) -> None:
        if "{completion}" not in prompt:
            raise ValueError("`prompt` must hold {completion}: the judge would not see what it grades")
        self._prompt = prompt
        self._verdict, self._refusal = re.compile(verdict), re.compile(refusal)
        if self._verdict.groups < 1:
            raise ValueError(f"`verdict` {verdict!r} needs a group: the text that is the score")
        if scale == 0 or attempts < 1 or concurrency < 1 or timeout_s <= 0:
            raise ValueError(
                "`scale` must not be 0, `attempts` and `concurrency` at least 1, `timeout_s` above 0"
            )
        self._scale, self._bounds = scale, bounds
        self._words = {word.casefold(): value for word, value in (words or {}).items()}
        self._attempts, self._timeout_s = attempts, timeout_s
        self._slots = asyncio.Semaphore(concurrency)
        self._max_calls, self._max_tokens = max_calls, max_tokens
        self._num_calls = self._num_tokens = 0
        self._cache: OrderedDict[tuple[str, int], float] = OrderedDict()
        self._cache_entries = cache_entries
        self._version = -1
        self._on_failure = on_failure

    async def __call__(
        self, task: TaskSpec, completion: str, *, policies: Mapping[str, Policy] | None = None
    ) -> Score:
        """Return the score. Raises RewardFailed by the rule, MissingCapability where no judge can be asked."""
        judge = (policies or {}).get(ROLE)
        if judge is None:
            raise RewardFailed(
                f"the workflow hands no policy of the role {ROLE!r} to its reward (it hands "
                f"{', '.join(policies or {}) or 'none'}); call `reward(task, text, policies=policies)`"
            )
        question = self._question(task, completion)
        digest = hashlib.sha256(f"{judge.name}\0{question}".encode()).hexdigest()
        if (known := self._cache.get((digest, self._version))) is not None:
            self._cache.move_to_end((digest, self._version))
            return Score(known, {"judged": 1.0, "judge_cached": 1.0})
        try:
            reward = await self._asked(judge, question)
        except JudgeFailed as failure:
            return self._without_verdict(failure)
        self._remember(digest, reward)
        return Score(reward, {"judged": 1.0, "judge_cached": 0.0})

    def _question(self, task: TaskSpec, completion: str) -> str:
        given = {
            "{task}": "\n".join(message.content for message in task.messages),
            "{completion}": completion,
            "{answer}": str(task.data.get("answer", "")),
        }
        # In one pass: a completion that holds `{answer}` must not learn it.
        return re.sub("|".join(map(re.escape, given)), lambda found: given[found[0]], self._prompt)

    async def _asked(self, judge: Policy, question: str) -> float:
        """The verdict, asked for again while the judge answers with none. Raises JudgeFailed."""
        for attempt in range(1, self._attempts + 1):
            try:
                return self._reward_of(await self._answer(judge, question))
            except JudgeFailed as failure:
                if attempt == self._attempts or failure.kind not in ("garbage", "refused"):
                    raise
        raise AssertionError

    async def _answer(self, judge: Policy, question: str) -> GenerateResult:
        async with self._slots:
            self._spend(question)
            limit = asyncio.timeout(self._timeout_s)
            try:
                async with limit:
                    result = await judge.chat([Message("user", question)])
            except (MissingCapability, PolicyUnavailable):
                raise
            except TimeoutError as error:
                if not limit.expired():
                    raise JudgeFailed("error", f"TimeoutError: {error}") from error
                raise JudgeFailed("timeout", f"no answer within timeout_s {self._timeout_s}") from error
            except Exception as error:
                raise JudgeFailed("error", f"{type(error).__name__}: {error}"[:_SHOWN_CHARS]) from error
        self._num_tokens += len(result.token_ids) or _tokens_of(result.text)
        self._version = max((span.version for span in result.version_spans), default=self._version)
        return result

    def _spend(self, question: str) -> None:
        if 0 < self._max_calls <= self._num_calls or 0 < self._max_tokens <= self._num_tokens:
            raise JudgeFailed(
                "budget",
                f"{self._num_calls} calls and about {self._num_tokens} tokens are spent; raise max_calls "
                f"({self._max_calls}) or max_tokens ({self._max_tokens})",
            )
        self._num_calls += 1
        self._num_tokens += _tokens_of(question)

    def _reward_of(self, result: GenerateResult) -> float:
        if result.finish_reason == "content_filter" or not result.text.strip():
            raise JudgeFailed("refused", f"an empty answer, finish reason {result.finish_reason}")
        matches = list(self._verdict.finditer(result.text))
        if not matches:
            kind = "refused" if self._refusal.search(result.text) else "garbage"
            raise JudgeFailed(
                kind, f"no match of {self._verdict.pattern!r} in {result.text[-_SHOWN_CHARS:]!r}"
            )
        said = matches[-1].group(1)
        try:
            reward = self._words.get(said.casefold())
            reward = float(said) / self._scale if reward is None else reward
        except ValueError as error:
            raise JudgeFailed(
                "garbage", f"the verdict {said[:_SHOWN_CHARS]!r} is no number and none of `words`"
            ) from error
        if not self._bounds[0] <= reward <= self._bounds[1]:
            raise JudgeFailed("garbage", f"the verdict {reward} is outside `bounds` {self._bounds}")
        return reward

    def _without_verdict(self, failure: JudgeFailed) -> Score:
        if self._on_failure == "fail":
            reason = "reward_timeout" if failure.kind == "timeout" else "reward_error"
            raise RewardFailed(str(failure), reason=reason) from failure
        return Score(self._on_failure, {"judged": 0.0, f"judge_{failure.kind}": 1.0})

    def _remember(self, digest: str, reward: float) -> None:
        self._cache[digest, self._version] = reward
        while len(self._cache) > self._cache_entries:
            self._cache.popitem(last=False)


def _tokens_of(text: str) -> int:
    """About: an endpoint elsewhere tells text only."""
    return -(-len(text.encode()) // _BYTES_PER_TOKEN)
