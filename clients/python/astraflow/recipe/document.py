"""Recipe text as a YAML document with line numbers, within bounds of size, depth and time: it may be anybody's text.

Invariants: nothing is built of a text that is too deep, and no alias makes a small text a large document; every value
of a `Document` has one place, whichever of the files and options that were laid over each other it is from. Called by
`file`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

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

Keys: TypeAlias = tuple[str, ...]


@dataclass
class Document:
    """Values laid over each other, and the place of each: `file:line`, or the option that set it."""

    values: dict[str, Any] = field(default_factory=dict)
    places: dict[Keys, str] = field(default_factory=dict)
    """By keys; the positions of list items are keys too."""
    options: dict[Keys, str] = field(default_factory=dict)
    """Of `places`, what options set."""
    num_texts: int = 0

    def lay(self, given: Mapping[str, Any], *, source: str) -> None:
        """Lay a text over what is there: mappings key by key, what has a `kind` or a `use` and all else as a whole.

        A key that is null takes out what is below it.
        """
        self.num_texts += 1
        self.places[()] = f"{source}:1"
        self._lay(self.values, given, (), source=source)

    def set(self, keys: Sequence[str], value: Any, *, option: str) -> None:  # noqa: ANN401 - YAML has no static type
        """Set one value for an option. Raises RecipeError where a key before the last is no mapping."""
        *parents, last = keys
        node, new = self.values, None
        for number, key in enumerate(parents, start=1):
            new = new or (number if key not in node else None)
            node = node.setdefault(key, {})
            if not isinstance(node, Mapping):
                raise RecipeError(f"{option}: {'.'.join(parents[:number])} is a value, not a section")
        node[last] = value
        brought = tuple(keys[: new or None])
        self._forget(tuple(keys))
        self.options[brought] = option
        for number in range(len(brought), len(keys) + 1):
            self.places[tuple(keys[:number])] = option

    def place(self, keys: Sequence[str | int]) -> str:
        """Return the place of the value at `keys`, or of the innermost section that would hold it."""
        given = tuple(map(str, keys))
        return next(place for n in range(len(given), -1, -1) if (place := self.places.get(given[:n])))

    def origin(self, keys: Sequence[str]) -> str | None:
        """Return the place that gave the value of a setting; None for one that nothing here says."""
        return self.place(keys) if self.says(keys) else None

    def says(self, keys: Sequence[str]) -> bool:
        """Whether the value of a setting is given here."""
        node: Any = self.values
        for key in keys:
            if isinstance(node, str) and key == "kind":
                break  # `loss: gspo`
            if not isinstance(node, Mapping) or key not in node:
                return False
            node = node[key]
        return True

    def _lay(self, node: dict[str, Any], given: Mapping[str, Any], above: Keys, *, source: str) -> None:
        for key, value in given.items():
            keys = (*above, str(key))
            if value is None and node.pop(key, None) is not None:
                self._forget(keys)
                continue
            own = node.get(key)
            if isinstance(value, Mapping) and isinstance(own, dict) and not _is_whole(value):
                self._lay(own, value, keys, source=source)
            else:
                if key in node:
                    self._forget(keys)
                node[key] = _plain(value)
                self._note(value, keys, source=source)
            self.places[keys] = f"{source}:{line_of(given, key)}"

    def _note(self, value: Any, above: Keys, *, source: str) -> None:  # noqa: ANN401
        for key, inner in value.items() if isinstance(value, Mapping) else _items(value):
            keys = (*above, str(key))
            self.places[keys] = f"{source}:{line_of(value, key)}"
            self._note(inner, keys, source=source)

    def _forget(self, keys: Keys) -> None:
        for path in [path for path in self.places if path[: len(keys)] == keys]:
            del self.places[path]


def _is_whole(value: Mapping[str, Any]) -> bool:
    """Whether it is one choice among several, of which a part means nothing to another: a loss, a plug-in."""
    return any(isinstance(value.get(key), str) for key in ("kind", "use"))


def _items(value: Any) -> Iterator[tuple[int, Any]]:  # noqa: ANN401
    yield from enumerate(value) if isinstance(value, list) else ()


def _plain(value: Any) -> Any:  # noqa: ANN401
    """The value without line numbers, which keep the whole text in memory, and never shared with its text."""
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, list) else value


def line_of(node: Any, key: Any) -> int:  # noqa: ANN401
    """Line of a key or of an item, from 1; 1 for what is from no text."""
    marks = getattr(node, "lc", None)
    if marks is None:
        return 1
    try:
        return int((marks.key(key) if isinstance(node, Mapping) else marks.item(key))[0]) + 1
    except (KeyError, TypeError):  # brought by an alias
        return int(marks.line) + 1


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
