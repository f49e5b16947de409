"""Recipe text as a YAML document with line numbers, within bounds of size, depth and time: it may be anybody's text.

Invariant: nothing is built of a text that is too deep, and no alias makes a small text a large document. Called by
`file`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError
from ruamel.yaml.scanner import RoundTripScanner, ScannerError

from astraflow._contract.rpcs import bounds_of
from astraflow.dataflow.v1 import run_pb2
from astraflow.errors import RecipeError

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_BYTES = bounds_of(run_pb2.Run, "recipe_yaml").max_bytes
MAX_DEPTH = 32
MAX_VALUES = 20_000
"""Keys and values; what an alias stands for counts each time."""
MAX_CPU_S = 10.0
"""Of the thread that reads; the largest text takes about two."""


def read_document(text: str, *, source: str) -> Any:  # noqa: ANN401 - a YAML document has no static type
    """Return what the text holds. Raises RecipeError naming source, line and bound."""
    if (size := len(text.encode())) > MAX_BYTES:
        raise RecipeError(
            f"{source}: {size} bytes, at most {MAX_BYTES}; data belongs in a data set's own files"
        )
    yaml = YAML(typ="rt")
    yaml.Scanner = _BoundedScanner
    try:
        document = yaml.load(text)
    except MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 0
        raise RecipeError(f"{source}:{line}: not valid YAML: {error.problem}") from error
    except Exception as error:  # the reader's own defects at text that no one would write
        raise RecipeError(f"{source}: not valid YAML: {type(error).__name__}: {error}") from error
    if sum(1 for _ in _values(document, at_most=MAX_VALUES)) > MAX_VALUES:
        raise RecipeError(f"{source}: more than {MAX_VALUES} values, counting what each alias stands for")
    return document


class _BoundedScanner(RoundTripScanner):
    """Ends at what is too deep, or takes too long, before anything is made of it."""

    _ends_s: float | None = None

    def fetch_more_tokens(self) -> Any:  # noqa: ANN401 - as ruamel has it
        if self._ends_s is None:
            self._ends_s = time.thread_time() + MAX_CPU_S
        if len(self.flow_context) + len(self.indents) > MAX_DEPTH:
            self._refuse(f"nested deeper than {MAX_DEPTH}")
        if time.thread_time() >= self._ends_s:
            self._refuse(f"reading it takes more than {MAX_CPU_S:g} s")
        return super().fetch_more_tokens()

    def _refuse(self, problem: str) -> None:
        raise ScannerError(problem=problem, problem_mark=self.reader.get_mark())


def _values(document: object, *, at_most: int) -> Iterator[object]:
    """The values of a document, one by one without recursion, and one more than `at_most` at most."""
    waiting, count = [document], 0
    while waiting and count <= at_most:
        count += 1
        node = waiting.pop()
        yield node
        if isinstance(node, Mapping):
            waiting += node.values()
        elif isinstance(node, Sequence) and not isinstance(node, str | bytes):
            waiting += node
