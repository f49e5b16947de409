r"""A ready-made reward: the last `\boxed{…}` of the completion must equal the task's answer.

Invariant: 1.0 or 0.0, decided by the text alone; numbers are compared as numbers (`7.0` is `7`, `1,000` is
`1000`), anything else as trimmed text. Named by a recipe as `astraflow_raas.rewards.boxed_match:BoxedMatch`;
the task carries the answer as `data["answer"]`.
"""

import re
from decimal import Decimal, InvalidOperation

from astraflow.plugins import TaskSpec

_OPEN = r"\boxed{"
_GROUPED = re.compile(r"[+-]?\d{1,3}(,\d{3})+(\.\d+)?")


class BoxedMatch:
    """Called by a workflow with the task and the completion's text."""

    def __call__(self, task: TaskSpec, completion: str) -> float:
        """Return 1.0 for the correct answer, else 0.0. Raises KeyError for a task without `answer`."""
        boxed = last_boxed(completion)
        return float(boxed is not None and _same(boxed, str(task.data["answer"])))


def last_boxed(text: str) -> str | None:
    r"""Content of the last complete `\boxed{…}`, braces inside it balanced; None when there is none."""
    start = text.rfind(_OPEN)
    while start >= 0:
        content = _balanced(text, start + len(_OPEN))
        if content is not None:
            return content
        start = text.rfind(_OPEN, 0, start)
    return None


def all_boxed(text: str) -> list[str]:
    r"""Contents of every complete `\boxed{…}`, outermost ones only, in their order."""
    found, start = [], text.find(_OPEN)
    while start >= 0:
        content = _balanced(text, start + len(_OPEN))
        end = start + len(_OPEN) + (len(content) if content is not None else 0)
        found += [content] if content is not None else []
        start = text.find(_OPEN, end)
    return found


def _balanced(text: str, start: int) -> str | None:
    depth = 1
    for position in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return text[start:position].strip()
    return None


def _same(given: str, wanted: str) -> bool:
    numbers = _number(given), _number(wanted)
    if None not in numbers:
        return numbers[0] == numbers[1]
    return given == wanted.strip()


def _number(text: str) -> Decimal | None:
    plain = text.strip().removeprefix("$")
    if _GROUPED.fullmatch(plain):
        plain = plain.replace(",", "")
    try:
        number = Decimal(plain)
    except InvalidOperation:
        return None
    return number if number.is_finite() else None
