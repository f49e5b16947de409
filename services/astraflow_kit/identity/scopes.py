"""What a request is about: the runs, policies and pools that it names, wherever its message holds them.

Invariant: fields are found by descriptor, so a new request, or a new field in one, is compared with the token as soon
as its contract has it. Called by `gate` for every message of every call whose token is not for everything.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from astraflow_kit.identity.tokens import ALL, Identity

_CLAIMS: dict[str, tuple[str, Callable[[Identity], frozenset[str]]]] = {
    "run_id": ("run", lambda identity: identity.runs),
    "policy_id": ("policy", lambda identity: identity.policies),
    "policy_ids": ("policy", lambda identity: identity.policies),
    "pool": ("pool", lambda identity: identity.pools),
}
_MAX_DEPTH = 6


@dataclass(frozen=True)
class Overreach:
    """What a request names and its token is not for; an empty `name` where the request must name one."""

    kind: str
    name: str
    allowed: frozenset[str]


def fields_of(request: Descriptor, name: str) -> list[tuple[FieldDescriptor, ...]]:
    """Paths to all fields of this name in a message and the messages that it holds."""
    return list(paths_to(request, frozenset({name})))


def narrow(request: Message, identity: Identity) -> Overreach | None:
    """Compare what the request names with what the token is for; None when it stays within.

    What is left empty becomes the token's only run, policy or pool, so that "the only one" never means another's.
    """
    for path in paths_to(request.DESCRIPTOR, frozenset(_CLAIMS)):
        field = path[-1]
        kind, claim = _CLAIMS[field.name]
        allowed = claim(identity)
        if ALL in allowed:
            continue
        for holder in holders(request, path[:-1]):
            if field.is_repeated:
                found = _within_list(holder, field, kind, allowed)
            else:
                found = _within(holder, field, kind, allowed)
            if found is not None:
                return found
    return None


def _within(holder: Message, field: FieldDescriptor, kind: str, allowed: frozenset[str]) -> Overreach | None:
    name = getattr(holder, field.name)
    if not name and len(allowed) == 1:
        setattr(holder, field.name, next(iter(allowed)))
        return None
    return None if name in allowed else Overreach(kind, name, allowed)


def _within_list(
    holder: Message, field: FieldDescriptor, kind: str, allowed: frozenset[str]
) -> Overreach | None:
    names = getattr(holder, field.name)
    if not names:
        names.extend(sorted(allowed))  # none means all: all that the token is for
        return None if allowed else Overreach(kind, "", allowed)
    return next((Overreach(kind, name, allowed) for name in names if name not in allowed), None)


def holders(message: Message, path: tuple[FieldDescriptor, ...]) -> Iterator[Message]:
    """The messages at the end of a path; none where one on the way is not set."""
    if not path:
        yield message
        return
    field, rest = path[0], path[1:]
    if field.is_repeated:
        for inner in getattr(message, field.name):
            yield from holders(inner, rest)
    elif message.HasField(field.name):
        yield from holders(getattr(message, field.name), rest)


@cache
def paths_to(request: Descriptor, names: frozenset[str]) -> tuple[tuple[FieldDescriptor, ...], ...]:
    """Paths to all fields of these names in a message and the messages that it holds."""
    return tuple(_search(request, names, depth=0))


def _search(
    message: Descriptor, names: frozenset[str], *, depth: int
) -> Iterator[tuple[FieldDescriptor, ...]]:
    for field in message.fields:
        inner = field.message_type
        if inner is None:
            if field.name in names:
                yield (field,)
        elif depth < _MAX_DEPTH and not inner.GetOptions().map_entry:
            for rest in _search(inner, names, depth=depth + 1):
                yield (field, *rest)
