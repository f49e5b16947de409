"""Every error of the tree arrives at the client as the error it was."""

from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2

from astraflow import errors
from astraflow._status import from_rpc_error, from_status, to_status


@pytest.mark.parametrize("kind", errors.ERRORS_BY_REASON.values())
def test_every_code_is_a_grpc_status_and_every_error_is_documented(kind: type[errors.AstraflowError]) -> None:
    assert kind.code in grpc.StatusCode.__members__
    assert kind.__doc__


def test_no_two_errors_share_a_reason() -> None:
    served = [kind for kind in all_kinds(errors.AstraflowError) if "reason" in vars(kind)]
    assert len({kind.reason for kind in served}) == len(served)


def all_kinds(root: type[errors.AstraflowError]) -> list[type[errors.AstraflowError]]:
    return [root, *(kind for child in root.__subclasses__() for kind in all_kinds(child))]


class Failed(grpc.RpcError):
    """gRPC's own refusal, without details of ours."""

    def trailing_metadata(self) -> Any:
        return None

    def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.RESOURCE_EXHAUSTED

    def details(self) -> str:
        return str(self)


class Overruled(Failed):
    """What gRPC makes of an answer whose headers are too large: its own code, and the details of the other."""

    def trailing_metadata(self) -> Any:
        details = to_status(errors.FencedError("epoch 1 is not the current one")).SerializeToString()
        return (("grpc-status-details-bin", details),)


def test_details_of_an_answer_that_did_not_arrive_do_not_count() -> None:
    typed = from_rpc_error(Overruled("received metadata size exceeds limit"))
    assert type(typed) is errors.ResourceExhaustedError


def test_an_error_without_details_is_classified_by_its_code() -> None:
    typed = from_rpc_error(Failed("out of streams"))
    assert type(typed) is errors.ResourceExhaustedError
    assert typed.message == "RESOURCE_EXHAUSTED: out of streams"


@pytest.mark.parametrize("side", ["CLIENT: Sent", "SERVER: Received"])
def test_a_message_that_grpc_finds_too_large_is_not_worth_repeating(side: str) -> None:
    typed = from_rpc_error(Failed(f"{side} message larger than max (67108865 vs. 67108864)"))
    assert type(typed) is errors.InvalidArgumentError


def test_a_reason_of_a_later_release_is_an_internal_error_with_its_message() -> None:
    status = to_status(errors.FencedError("gone"))
    status.details[0].Pack(error_details_pb2.ErrorInfo(reason="NOT_INVENTED_YET", domain="astraflow"))
    typed = from_status(status)
    assert type(typed) is errors.InternalError
    assert typed.message == "gone"


def test_a_status_of_somebody_else_is_not_ours() -> None:
    assert from_status(status_pb2.Status(code=5, message="not found")) is None
