"""One process acts, or each does its part, and all of them share the outcome, failures included.

Invariant: either every process returns or every process raises, so that nobody waits in a collective that
another one left. Messages are JSON in which bytes may stand, too. The shard publisher calls it.
"""

import json
from collections.abc import Callable
from typing import Any, TypeVar

from astraflow.errors import ERRORS_BY_REASON, AstraflowError, InternalError
from astraflow_weights.codec.peers import Peers

T = TypeVar("T")
# What a message may hold: JSON that its reader turns into values by name.
Encoded = Any


def _unchanged(value: Any) -> Any:  # noqa: ANN401 - whatever JSON holds
    return value


def on_first_rank(
    peers: Peers,
    action: Callable[[], T],
    *,
    encode: Callable[[T], Encoded] = _unchanged,
    decode: Callable[[Encoded], T] = _unchanged,
) -> T:
    """What `action` returned on the first process, everywhere; it runs only there.

    `encode` and `decode` are for results that are not JSON. Raises its error there, and one of the same kind elsewhere.
    """
    if peers.index == 0:
        found, outcome, failure = _attempt(action, encode=encode)
        peers.broadcast(outcome)
        if failure is not None:
            raise failure
        assert found is not None
        return found[0]
    return decode(_opened(peers.broadcast(b""), process=0))


def on_every_rank(peers: Peers, action: Callable[[], Encoded]) -> list[Encoded]:
    """What `action` returned on each process, in order.

    Raises its error where it failed, elsewhere one of the same kind as the first process's that failed.
    """
    _, outcome, failure = _attempt(action, encode=_unchanged)
    outcomes = peers.all_gather(outcome)
    if failure is not None:
        raise failure
    return [_opened(message, process=number) for number, message in enumerate(outcomes)]


def _attempt(
    action: Callable[[], T], *, encode: Callable[[T], Encoded]
) -> tuple[tuple[T] | None, bytes, Exception | None]:
    """The result, if there is one, the message for the others, and the failure, if there is one."""
    try:
        found = action()
    except Exception as error:  # noqa: BLE001 - sent to the others, then raised
        reason = error.reason if isinstance(error, AstraflowError) else InternalError.reason
        return None, json.dumps({"reason": reason, "message": str(error)}).encode(), error
    return (found,), json.dumps({"found": encode(found)}, default=_bytes_out).encode(), None


def _bytes_out(value: bytes) -> dict[str, str]:
    return {"hex": value.hex()}


def _bytes_in(content: dict[str, Any]) -> Encoded:
    return bytes.fromhex(content["hex"]) if content.keys() == {"hex"} else content


def _opened(message: bytes, *, process: int) -> Encoded:
    content = json.loads(message, object_hook=_bytes_in)
    if "reason" in content:
        kind = ERRORS_BY_REASON.get(content["reason"], InternalError)
        raise kind(f"process {process} of the publishers failed: {content['message']}")
    return content["found"]
