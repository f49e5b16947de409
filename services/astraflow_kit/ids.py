"""Sortable identifiers.

Invariant: ids made by one `IdSource` are unique and sort in the order they were made, even within a
millisecond or when the wall clock steps back. The form is 26 characters of Crockford base 32: 48 bits of
milliseconds, then 80 random bits. Daemons own one source each and pass it to domain code.
"""

import random
import secrets
import threading

from astraflow_kit.clock import Clock, SystemClock

_ALPHABET = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
_LENGTH = 26
_RANDOM_BITS = 80


class IdSource:
    """Makes ids; thread-safe. A `seed` makes the random part repeatable, for tests and simulations only."""

    def __init__(self, *, clock: Clock | None = None, seed: int | None = None) -> None:
        self._clock = clock or SystemClock()
        self._draw = secrets.randbits if seed is None else random.Random(seed).getrandbits
        self._lock = threading.Lock()
        self._last = 0

    def new(self) -> str:
        """Return the next id, greater than every earlier one of this source."""
        millis = int(self._clock.wall_time_s() * 1000)
        with self._lock:
            fresh = (millis << _RANDOM_BITS) | self._draw(_RANDOM_BITS)
            same_or_earlier = fresh >> _RANDOM_BITS <= self._last >> _RANDOM_BITS
            self._last = self._last + 1 if same_or_earlier else fresh
            return _encode(self._last)


def _encode(value: int) -> str:
    return "".join(_ALPHABET[(value >> shift) & 31] for shift in range(5 * (_LENGTH - 1), -1, -5))
