"""Bounds that several requests share, read from the contract. Pure; called by the servicers."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from astraflow._contract import bounds_of
from astraflow.dataflow.v1.run_service_pb2 import ListRunsRequest
from astraflow.errors import InvalidArgumentError

if TYPE_CHECKING:
    from astraflow.dataflow.v1.admin_service_pb2 import ListDeadLettersRequest, ListNodesRequest
    from astraflow.dataflow.v1.batch_service_pb2 import AcquireBatchRequest, VoidBatchRequest
    from astraflow.dataflow.v1.evaluation_service_pb2 import GetEvaluationRequest
    from astraflow.dataflow.v1.task_service_pb2 import LeaseTasksRequest
    from astraflow.dataflow.v1.version_service_pb2 import ListVersionsRequest, PinVersionRequest

_DEFAULT_PAGE = 50
_PAGE_NUMBER = bounds_of(ListRunsRequest, "page_token").pattern


def wait_seconds(request: AcquireBatchRequest | LeaseTasksRequest) -> float:
    """Return a long poll's wait. Raises InvalidArgumentError when it is negative or too long."""
    seconds = request.wait_duration.ToNanoseconds() / 1e9
    most = bounds_of(type(request), "wait_duration").max
    if not 0 <= seconds <= most:
        raise InvalidArgumentError(
            f"wait_duration {seconds} s must be 0–{most:g} s; call again to wait longer"
        )
    return seconds


def require_short_reason(request: VoidBatchRequest | PinVersionRequest) -> None:
    """Raise InvalidArgumentError for a reason beyond its bound."""
    limit = bounds_of(type(request), "reason").max_len
    if len(request.reason) > limit:
        raise InvalidArgumentError(f"reason has {len(request.reason)} characters, at most {limit}")


def page_size(
    request: ListRunsRequest
    | ListVersionsRequest
    | ListNodesRequest
    | ListDeadLettersRequest
    | GetEvaluationRequest,
) -> int:
    """Return how many items a page has."""
    return min(request.page_size or _DEFAULT_PAGE, int(bounds_of(type(request), "page_size").max))


def page_number(token: str) -> int | None:
    """Return the number a page token stands for, None for the first page. Raises InvalidArgumentError."""
    if not re.fullmatch(_PAGE_NUMBER, token):
        raise InvalidArgumentError(
            f"page_token {token!r} is not one of ours; pass next_page_token of the previous page, or nothing"
        )
    return int(token) if token else None
