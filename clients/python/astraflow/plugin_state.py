"""What data plug-ins know of trajectories, and what they remember: a small mapping of JSON values.

Part of `astraflow.plugins`, which has these names. The state of a plug-in survives the server: a class whose
constructor names a parameter `state` is given one. The dataflow server saves what a call changed when the call is over,
and loads it again after a restart. Tests of a plug-in make an empty one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias, runtime_checkable

JsonValue: TypeAlias = Any
MAX_STATE_BYTES = 16 * 1024 * 1024
MAX_VALUE_BYTES = 64 * 1024
MAX_KEY_BYTES = 256


@dataclass(frozen=True, kw_only=True)
class TrajectorySummary:
    """What the server knows of one trajectory without reading its tokens; versions are weight versions.

    In a run it is the contract's own message, to be read only; tests make these. Equal responses have equal digests.
    """

    reward: float
    trajectory_id: str = ""
    num_tokens: int = 0
    num_trainable_tokens: int = 0
    min_version: int = 0
    max_version: int = 0
    finish_reason: str = "stop"
    metrics: Mapping[str, float] = field(default_factory=dict)
    response_digest: int = 0
    node_id: str = ""


@dataclass(frozen=True, kw_only=True)
class MeasuredTrajectory:
    """A trajectory that was trained on for the first time, and how far trainer and engine were apart on it."""

    mismatch_kl: float
    """Mean over its trained tokens of the k3 estimate of KL(engine ‖ trainer), in nats, as the step began: what kernels
    and precision make of it, and the versions between sampling and training."""
    node_id: str = ""
    source: str = ""
    version: int = 0
    """Newest that sampled it."""


@dataclass(frozen=True, kw_only=True)
class MeasuredStep:
    """What the trainer of a policy measured in a step."""

    policy: str
    step: int
    trajectories: Sequence[MeasuredTrajectory]


@runtime_checkable
class Measuring(Protocol):
    """What a filter with a `state` may have besides, to learn from what was trained on."""

    def measured(self, step: MeasuredStep) -> None:
        """Learn from a step that was trained on. May be called again for the same one, after a lost answer."""


class PluginState(MutableMapping[str, JsonValue]):
    """Keys are text, values anything JSON can hold; what is read is a copy, so set a key again to change it.

    Setting raises ValueError beyond the bounds, TypeError for a value that is not JSON.
    """

    def __init__(self, entries: Mapping[str, bytes] | None = None) -> None:
        """`entries` are encoded values, as `changes` returns them."""
        self.replace(entries or {})

    def replace(self, entries: Mapping[str, bytes]) -> None:
        """Hold exactly these encoded values, none of them changed."""
        self._entries = dict(entries)
        self._num_bytes = sum(len(key.encode()) + len(value) for key, value in entries.items())
        self._changed: set[str] = set()

    def changes(self) -> dict[str, bytes]:
        """Return the encoded values set since the last `saved` or `replace`; a deleted key's is empty."""
        return {key: self._entries.get(key, b"") for key in self._changed}

    def saved(self) -> None:
        """Count all changes as saved."""
        self._changed.clear()

    def __getitem__(self, key: str) -> JsonValue:
        return json.loads(self._entries[key])

    def encoded(self) -> dict[str, bytes]:
        """Return all encoded values."""
        return dict(self._entries)

    def merge(self, changes: Mapping[str, bytes]) -> None:
        """Take encoded values as `changes` returns them, as if each had been set or deleted here."""
        for key, value in changes.items():
            if value:
                self._put(key, value)
            elif key in self._entries:
                del self[key]

    def __setitem__(self, key: str, value: JsonValue) -> None:
        self._put(key, json.dumps(value, separators=(",", ":")).encode())

    def _put(self, key: str, encoded: bytes) -> None:
        key_bytes = len(key.encode())
        if not 0 < key_bytes <= MAX_KEY_BYTES or len(encoded) > MAX_VALUE_BYTES:
            raise ValueError(
                f"key {key[:64]!r} has {key_bytes} bytes and its value {len(encoded)}; a state takes keys of 1 to "
                f"{MAX_KEY_BYTES} bytes and values of at most {MAX_VALUE_BYTES}: split the value over several keys"
            )
        before = key_bytes + len(self._entries[key]) if key in self._entries else 0
        num_bytes = self._num_bytes - before + key_bytes + len(encoded)
        if num_bytes > MAX_STATE_BYTES:
            raise ValueError(
                f"the state would hold {num_bytes} bytes, at most {MAX_STATE_BYTES}; delete keys that are not needed"
            )
        self._num_bytes = num_bytes
        self._entries[key] = encoded
        self._changed.add(key)

    def __delitem__(self, key: str) -> None:
        self._num_bytes -= len(key.encode()) + len(self._entries.pop(key))
        self._changed.add(key)

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)
