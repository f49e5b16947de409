"""What Redis answers becomes an error whose kind says what to do next, and whose message says how."""

from __future__ import annotations

import pytest
from redis import exceptions as redis_errors

from astraflow import errors
from astraflow_dataflow.store.connection import translate

ROWS: dict[str, tuple[Exception, type[errors.AstraflowError], str]] = {
    "away": (redis_errors.ConnectionError("refused"), errors.UnavailableError, "does not answer: refused"),
    "slow": (redis_errors.TimeoutError("late"), errors.UnavailableError, "does not answer: late"),
    "loading": (
        redis_errors.BusyLoadingError("loading"),
        errors.UnavailableError,
        "does not answer: loading",
    ),
    "no password": (
        redis_errors.AuthenticationError("NOAUTH"),
        errors.PreconditionError,
        "give redis://USER:PASSWORD@HOST:PORT/DB",
    ),
    "user without rights": (
        redis_errors.NoPermissionError("NOPERM fcall"),
        errors.PreconditionError,
        "one who may run all commands",
    ),
    "replica": (redis_errors.ReadOnlyError("READONLY"), errors.UnavailableError, "address of its primary"),
    "full": (redis_errors.OutOfMemoryError("used"), errors.ResourceExhaustedError, "give it more memory"),
    "full, said by a function": (
        redis_errors.ResponseError("OOM command not allowed"),
        errors.ResourceExhaustedError,
        "let trainers consume",
    ),
    "disk full": (
        redis_errors.ResponseError("MISCONF Errors writing to the AOF file: No space left on device"),
        errors.UnavailableError,
        "No space left on device; free its disk",
    ),
    "fenced by a function": (
        redis_errors.ResponseError("FENCED epoch 1 is over"),
        errors.FencedError,
        "epoch 1 is over",
    ),
    "anything else": (
        redis_errors.ResponseError("ERR odd"),
        errors.InternalError,
        "answered an error: ERR odd",
    ),
}


@pytest.mark.parametrize("row", ROWS)
def test_an_answer_of_redis_becomes_a_typed_error(row: str) -> None:
    answer, kind, words = ROWS[row]
    error = translate(answer)
    assert type(error) is kind
    assert words in error.message


def test_a_passing_fault_says_when_to_call_again() -> None:
    for answer, kind, _ in ROWS.values():
        if issubclass(kind, errors.RetryableError):
            assert translate(answer).retry_after_s
