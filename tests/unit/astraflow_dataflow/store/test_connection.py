"""What Redis answers becomes an error whose kind says what to do next, and whose message says how."""

import pytest
from redis import exceptions as redis

from astraflow import errors
from astraflow_dataflow.store.connection import translate

said = redis.ResponseError
FULL, AWAY, REFUSED = errors.ResourceExhaustedError, errors.UnavailableError, errors.PreconditionError
ROWS: dict[str, tuple[Exception, type[errors.AstraflowError], str]] = {
    "away": (redis.ConnectionError("refused"), AWAY, "does not answer: refused"),
    "slow": (redis.TimeoutError("late"), AWAY, "does not answer: late"),
    "loading": (redis.BusyLoadingError("loading"), AWAY, "does not answer: loading"),
    "no password": (redis.AuthenticationError("NOAUTH"), REFUSED, "in --redis-password-file"),
    "user without rights": (redis.NoPermissionError("NOPERM fcall"), REFUSED, "one who may run all commands"),
    "replica": (redis.ReadOnlyError("READONLY"), AWAY, "address of its primary"),
    "full": (redis.OutOfMemoryError("used"), FULL, "give it more memory"),
    "full, said by a function": (said("OOM command not allowed"), FULL, "let trainers consume"),
    "disk full": (said("MISCONF Errors writing: No space left"), AWAY, "No space left; free its disk"),
    "fenced by a function": (said("FENCED epoch 1 is over"), errors.FencedError, "epoch 1 is over"),
    "anything else": (said("ERR odd"), errors.InternalError, "answered an error: ERR odd"),
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
