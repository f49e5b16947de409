"""How many steps a backtracking search takes: a model of Python's `re` that counts instead of measuring time.

It tries what `re` tries, in the same order, without its short cuts, so a count that grows with the square of the text
is a search that somebody can make slow. Repeats within repeats are tried in one way only, so it is not for them.
"""

import re
from collections.abc import Iterator
from re import _constants as op  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any


class _Counted:
    def __init__(self, pattern: re.Pattern[str], text: str) -> None:
        self._ignores_case = bool(pattern.flags & re.IGNORECASE)
        self._text = text
        self._fits: dict[tuple[str, str], bool] = {}
        self.steps = 0

    def ends(self, nodes: list[Any], at: int) -> Iterator[int]:
        """Where a match of `nodes` that begins at `at` may end, in the order in which they are tried."""
        self.steps += 1
        if not nodes:
            yield at
            return
        (kind, detail), rest = nodes[0], nodes[1:]
        if kind is op.SUBPATTERN:
            yield from self.ends([*detail[3], *rest], at)
        elif kind is op.BRANCH:
            for branch in detail[1]:
                yield from self.ends([*branch, *rest], at)
        elif kind in (op.MAX_REPEAT, op.POSSESSIVE_REPEAT):
            yield from self._repeated(kind, detail, rest, at)
        elif kind is op.AT:
            if re.compile(r"\b").match(self._text, at):
                yield from self.ends(rest, at)
        elif at < len(self._text) and self._is_one(kind, detail, self._text[at]):
            yield from self.ends(rest, at + 1)

    def _repeated(self, kind: object, detail: Any, rest: list[Any], at: int) -> Iterator[int]:
        least, most, inner = detail
        ends = [at]
        while len(ends) <= most and (end := next(self.ends(list(inner), ends[-1]), None)) is not None:
            ends.append(end)
        fitting = ends[least:]
        for end in reversed(fitting if kind is op.MAX_REPEAT else fitting[-1:]):
            yield from self.ends(rest, end)

    def _is_one(self, kind: object, detail: Any, character: str) -> bool:
        known = (str((kind, detail)), character)
        if known not in self._fits:
            tree = parser.SubPattern(parser.State(), [(kind, detail)])
            flags = re.IGNORECASE if self._ignores_case else 0
            self._fits[known] = bool(re._compiler.compile(tree, flags).fullmatch(character))  # type: ignore[attr-defined]
        return self._fits[known]


def search_steps(pattern: re.Pattern[str], text: str) -> int:
    """Steps of replacing all matches of `pattern` in `text`."""
    counted, nodes, at = _Counted(pattern, text), list(parser.parse(pattern.pattern, pattern.flags)), 0
    while at <= len(text):
        end = next(counted.ends(nodes, at), None)
        at = max(at + 1, end or 0)
    return counted.steps
