"""Whether a store keeps the promise that the weight path is built on: of any number of create-only PUTs of one key,
exactly one creates the object.

Invariant: a store that lets two writers win is refused before anything is built on it. Some stores answer right to one
writer after another and wrong to many at once, so many are tried, with bodies of a size that some stores treat
otherwise. Trainers, `astraflow runs create` and `astraflow dev` ask at their start, `astraflow doctor` when told to.
"""

import secrets
import threading
from concurrent.futures import ThreadPoolExecutor

from astraflow_weights.errors import ObjectNotFound, StoreRefused
from astraflow_weights.store import ObjectStore, PutResult

WRITERS = 32
BODY_BYTES = 2**20 + 1
PASSED_KEY = "probe/create-only"
"""Holds what was proven of this store, so that a trainer that starts again does not send the bodies again."""
_PASSED = f"{WRITERS} writers of {BODY_BYTES} bytes, one winner".encode()
_START_TIMEOUT_S = 60.0
_REMEDY = "two trainers could overwrite each other; use a store that supports `If-None-Match: *`"


def probe_create_only(store: ObjectStore, *, remember: bool = True) -> None:
    """Prove that the store honours create-only PUT, one after another and many at once.

    What many at once showed is kept in the store and read again next time; without `remember` it is always shown anew
    and nothing stays. Raises StoreRefused when the store breaks the promise, and as the store does when it cannot be
    used at all.
    """
    _one_after_another(store)
    if remember and _has_passed(store):
        return
    _many_at_once(store)
    if remember:
        store.put_if_absent(PASSED_KEY, _PASSED)


def _has_passed(store: ObjectStore) -> bool:
    try:
        return store.get(PASSED_KEY) == _PASSED
    except ObjectNotFound:
        return False


def _one_after_another(store: ObjectStore) -> None:
    key = f"probe/{secrets.token_hex(16)}"
    first, second = b"first", b"second"
    created = store.put_if_absent(key, first)
    try:
        answers = (created, store.put_if_absent(key, second))
        content = store.get(key)
    finally:
        store.delete(key)
    if answers != (PutResult.CREATED, PutResult.EXISTS) or content != first:
        raise StoreRefused(
            f"{store.uri} does not honour create-only PUT (two PUTs of one key answered "
            f"{answers[0].value} and {answers[1].value} and left {content!r}): {_REMEDY}"
        )


def _many_at_once(store: ObjectStore) -> None:
    key, barrier = f"probe/{secrets.token_hex(16)}", threading.Barrier(WRITERS)

    def write(number: int) -> bool:
        body = _body(number)
        barrier.wait(_START_TIMEOUT_S)
        return store.put_if_absent(key, body) is PutResult.CREATED

    try:
        with ThreadPoolExecutor(WRITERS, thread_name_prefix="store-probe") as writers:
            created = list(writers.map(write, range(WRITERS)))
        content = store.get(key)
    finally:
        store.delete(key)
    winners = [number for number, won in enumerate(created) if won]
    if len(winners) != 1 or content != _body(winners[0]):
        kept = (
            "and keeps what another wrote"
            if len(winners) == 1
            else f"and told {len(winners)} that they created it"
        )
        raise StoreRefused(
            f"{store.uri} does not honour create-only PUT when {WRITERS} write one key of {BODY_BYTES} bytes at the "
            f"same moment ({kept}): {_REMEDY}, for many writers too; docs/deploy/security.md names some that do"
        )


def _body(number: int) -> bytes:
    return number.to_bytes(1, "big") * BODY_BYTES
