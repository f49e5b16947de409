"""Every error of the tree arrives at the client as the error it was."""

from __future__ import annotations

import grpc
import pytest
from google.rpc import status_pb2

from astraflow import errors
from astraflow._status import from_status, to_status


@pytest.mark.parametrize("kind", sorted(errors.ERRORS_BY_REASON.values(), key=lambda kind: kind.reason))
def test_every_error_survives_the_wire(kind: type[errors.AstraflowError]) -> None:
    sent = kind("value 3 exceeds 2; lower it", metadata={"field": "steps"}, retry_after_s=1.5)
    received = from_status(status_pb2.Status.FromString(to_status(sent).SerializeToString()))
    assert type(received) is kind
    assert received is not None
    assert (received.message, received.metadata, received.retry_after_s) == (sent.message, sent.metadata, 1.5)


@pytest.mark.parametrize("kind", errors.ERRORS_BY_REASON.values())
def test_every_code_is_a_grpc_status_and_every_error_is_documented(kind: type[errors.AstraflowError]) -> None:
    assert kind.code in grpc.StatusCode.__members__
    assert kind.__doc__


def test_reasons_are_unique() -> None:
    kinds = [kind for kind in errors.ERRORS_BY_REASON.values()]
    assert len(kinds) == len({kind.__name__ for kind in kinds})


def test_a_status_of_somebody_else_is_not_ours() -> None:
    assert from_status(status_pb2.Status(code=5, message="not found")) is None
