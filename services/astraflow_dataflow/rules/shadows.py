"""What the shadow plug-ins of a run would have decided, as this process asked them: counts beside what happened.

Pure. Noted by whoever asks a plug-in that nobody obeys, shown by reporting.
"""

from dataclasses import dataclass, field


@dataclass
class Shadow:
    """One shadow plug-in; `kind` is `curator`, `filter` or `selector`."""

    kind: str
    name: str
    asked: int = 0
    """Decisions: groups of a filter or selector, tasks of a curator."""
    differs: int = 0
    """Those that were decided otherwise."""
    refused: int = 0
    """Those that it would have refused: groups of a filter, tasks of a curator."""


@dataclass
class Shadows:
    """The shadow plug-ins of a run."""

    _of: dict[tuple[str, str], Shadow] = field(default_factory=dict)

    def note(self, kind: str, name: str, *, asked: int, differs: int, refused: int = 0) -> None:
        """Count decisions."""
        shadow = self._of.setdefault((kind, name), Shadow(kind, name))
        shadow.asked += asked
        shadow.differs += differs
        shadow.refused += refused

    def all(self) -> list[Shadow]:
        """Return those that were asked, by kind and name."""
        return [self._of[key] for key in sorted(self._of)]
