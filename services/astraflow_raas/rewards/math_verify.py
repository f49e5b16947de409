r"""A ready-made reward: the boxed answer means the same as the task's, by the package math-verify.

Invariant: it costs what `limits` allow, whatever stands in the box: numbers are compared without the package, costly
text is never computed, and the rest has a second of CPU time. Named by a recipe as
`astraflow_raas.rewards.math_verify:MathVerify`; runs on the main thread of worker processes, whose alarms it uses.
"""

import importlib
import logging
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, Literal

from astraflow.plugins import MissingCapability, RewardFailed, RewardLimits, Score, TaskSpec
from astraflow_raas.rewards.boxed_match import all_boxed
from astraflow_raas.rewards.math_text import (
    differ_in_base_or_unit,
    is_costly,
    number_of,
    plain,
    without_percent,
    words_of,
)

_LIMIT_CPU_S = 1.0
_AGAIN_CPU_S = 0.05
"""Until the next ring: Python drops what a handler raises in a destructor or a callback of a weak reference."""
_MAX_CHARACTERS = 256


class MathVerify:
    r"""1.0 when the completion's `\boxed{…}` means `task.data["answer"]`, else 0.0.

    `percent: exact` takes 50% as 0.5; `ignore` drops the sign, for data whose answers are written with and without it.
    `boxes` says what several boxes mean: the `last` counts, or `all` must be right. `require_box: false` reads the end
    of a completion without one. Metrics: `has_answer`, `math_timeout`.
    """

    limits = RewardLimits(processes=2, timeout_s=3.0, memory_mb=1024, timeout_reward=0.0)

    def __init__(
        self,
        *,
        percent: Literal["exact", "ignore"] = "exact",
        boxes: Literal["last", "all"] = "last",
        require_box: bool = True,
    ) -> None:
        try:
            self._library: Any = importlib.import_module("math_verify")
        except ModuleNotFoundError as error:
            raise MissingCapability(
                "MathVerify needs the package math-verify; pip install 'astraflow[math]'"
            ) from error
        logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own limits are off
        self._as_hundredths = percent == "exact"
        self._boxes = boxes
        self._require_box = require_box
        self._parsed_answer = lru_cache(maxsize=4096)(self._parsed)
        # The package loads its grammar on first use, which would come out of the first answer's second.
        self._library.verify(self._parsed("x+1"), self._parsed("1+x"), timeout_seconds=None)

    def __call__(self, task: TaskSpec, completion: str) -> Score:
        """Return the score. Raises RewardFailed when the task's own answer cannot be read."""
        if "answer" not in task.data:
            raise RewardFailed(f"task {task.task_id} has no data['answer']; put its correct answer there")
        gold = self._normal(str(task.data["answer"]))
        try:
            with _alarm(_LIMIT_CPU_S):
                given = self._given(completion)
                is_right = bool(given) and all(self._same(gold, self._normal(text)) for text in given)
        except _OutOfTime:
            return Score(0.0, {"has_answer": 1.0, "math_timeout": 1.0})
        return Score(float(is_right), {"has_answer": float(bool(given)), "math_timeout": 0.0})

    def _given(self, completion: str) -> list[str]:
        boxes = all_boxed(completion)
        if not boxes and not self._require_box:
            boxes = self._at_the_end_of(completion.strip()[-_MAX_CHARACTERS:])
        boxes = [box for box in boxes if box]
        return boxes if self._boxes == "all" else boxes[-1:]

    def _at_the_end_of(self, text: str) -> list[str]:
        """The expression that the package finds there, as text."""
        found = [] if is_costly(text) else self._library.parse(text, parsing_timeout=None)
        return [part for part in found if isinstance(part, str)]

    def _normal(self, text: str) -> str:
        return without_percent(plain(text), as_hundredths=self._as_hundredths)

    def _same(self, gold: str, given: str) -> bool:
        if gold == given or (words_of(gold) or gold) == words_of(given):
            return True
        numbers = number_of(gold), number_of(given)
        if None not in numbers:
            return numbers[0] == numbers[1]
        if len(given) > _MAX_CHARACTERS or is_costly(given) or is_costly(gold):
            return False
        if differ_in_base_or_unit(gold, given):
            return False
        parsed = self._parsed_answer(gold)
        if not parsed:
            raise RewardFailed(f"math-verify cannot read the task's answer {gold[:100]!r}; correct the data")
        return bool(self._library.verify(parsed, self._parsed(given), timeout_seconds=None))

    def _parsed(self, text: str) -> Any:  # noqa: ANN401 - the package has no types
        # Its own limits are alarms of whole seconds, one for each step; ours bounds all of them.
        return self._library.parse(f"$\\boxed{{{text}}}$", parsing_timeout=None)


class _OutOfTime(BaseException):
    """Not an Exception: the package catches those, and would go on."""


@contextmanager
def _alarm(cpu_s: float) -> Iterator[None]:
    """Raise _OutOfTime inside after so many seconds of this process's CPU time: a busy machine shortens nothing."""
    rings = True

    def ring(*_: object) -> None:
        if rings:
            raise _OutOfTime

    before = signal.signal(signal.SIGPROF, ring)
    signal.setitimer(signal.ITIMER_PROF, cpu_s, _AGAIN_CPU_S)
    try:
        yield
    finally:
        rings = False
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
