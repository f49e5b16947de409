"""Suggestions for mistyped names.

Every refusal of an unknown name (setting, failpoint, metric, plug-in) ends with the same sentence, so a
user learns one form. Called by the modules that refuse names.
"""

from collections.abc import Iterable
from difflib import get_close_matches

_MAX_LISTED = 12


def nearest_names(name: str, known: Iterable[str], *, cutoff: float = 0.6) -> list[str]:
    """Up to three known names closest to `name`, best first; empty when nothing is close."""
    return get_close_matches(name, list(known), n=3, cutoff=cutoff)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """One sentence naming the closest known names, or listing what exists when none is close."""
    names = sorted(known)
    close = nearest_names(name, names)
    if close:
        return f"Did you mean {' or '.join(map(repr, close))}?"
    if not names:
        return "There are none to choose from."
    shown = ", ".join(names[:_MAX_LISTED])
    rest = len(names) - _MAX_LISTED
    return f"Known: {shown}{f' and {rest} more' if rest > 0 else ''}."
