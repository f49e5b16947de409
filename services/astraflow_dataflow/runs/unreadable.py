"""A run whose data in Redis is not what this release writes: told by name, left as it is, and no harm to other runs."""

from collections.abc import Iterator
from contextlib import contextmanager

from google.protobuf.message import DecodeError

from astraflow.errors import PreconditionError


@contextmanager
def reading(run_id: str) -> Iterator[None]:
    """Within the block the data of a run is read. Raises PreconditionError where it makes no sense, with what to do."""
    try:
        yield
    except (ValueError, LookupError, TypeError, DecodeError) as error:
        raise PreconditionError(
            f"run {run_id} cannot be read from Redis ({type(error).__name__}: {error}); other runs are served. Restore "
            f"Redis' data from before it was damaged, or give the run up: astraflow runs delete {run_id} --force"
        ) from error
