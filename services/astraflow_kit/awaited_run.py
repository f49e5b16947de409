"""A run that a daemon is started for and that may not be there yet: what is worth waiting for, and what is not.

Invariant: a server that does not answer and a run that nobody has created are waited for within the daemon's patience,
and named in the log meanwhile; whatever waiting cannot mend is raised at once with the option to change. Nodes and
trainers ask by their own kind of client and tell `AwaitedRun` of each failure.
"""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from astraflow.client import DEFAULT_TIMEOUT_S, RetryPolicy
from astraflow.errors import (
    AstraflowError,
    InvalidArgumentError,
    NotFoundError,
    PermissionError_,
    PreconditionError,
    RetryableError,
    UnauthenticatedError,
    UnavailableError,
    UnimplementedError,
)
from astraflow_kit.log import get_logger

log = get_logger(__name__)

_RETRY = RetryPolicy(first_wait_s=0.1, max_wait_s=1.0)
ONCE = RetryPolicy(total_s=0)
"""For the calls themselves: `AwaitedRun` repeats them."""
_LOG_EVERY_S = 10.0
_LEAST_TIMEOUT_S = 2.0


class NameInUse(PreconditionError):
    """A session of this name is live, and this process does not continue it."""


@dataclass
class AwaitedRun:
    """Decides after each failure to get the run whether it is asked for again."""

    address: str
    run_id: str
    """Empty for the server's only run."""
    event: str
    """What the log calls it, once every ten seconds."""
    role: str
    """What its token must be for."""
    patience_s: float
    _started_s: float = field(default_factory=time.monotonic)
    _logged_s: float = -math.inf
    _failures: int = 0

    @property
    def answer_timeout_s(self) -> float:
        """Seconds that one call may take: not beyond patience, but never too short for a server that is there."""
        return min(DEFAULT_TIMEOUT_S, max(self.patience_s, _LEAST_TIMEOUT_S))

    def wait_s_after(self, error: AstraflowError) -> float:
        """Seconds until the next try. Raises UnavailableError where patience ended, else what the daemon ends with."""
        if isinstance(error, NotFoundError) and not self.run_id and error.metadata.get("reason") == "run":
            error = PermissionError_(f"{error.message} (name it with --run-id to wait until it is created)")
        awaited = "run" if isinstance(error, NotFoundError) else "server"
        if awaited == "server" and not isinstance(error, RetryableError):
            with suggesting_fixes(self.address, role=self.role):
                raise error
        self._failures += 1
        wait_s, waited_s = _RETRY.wait_s(self._failures), time.monotonic() - self._started_s
        if waited_s + wait_s > self.patience_s:
            raise UnavailableError(self._gave_up(error, awaited=awaited, waited_s=waited_s)) from error
        if time.monotonic() - self._logged_s >= _LOG_EVERY_S:
            self._logged_s = time.monotonic()
            log.info(self.event, waiting_for=awaited, since_s=round(waited_s, 1), why=error.message)
        return wait_s

    def _gave_up(self, error: AstraflowError, *, awaited: str, waited_s: float) -> str:
        what, mend = (
            ("has no run to join", "create it, check --run-id and --join")
            if awaited == "run"
            else ("did not answer", "start it, check --join")
        )
        return (
            f"the dataflow server at {self.address} {what} within {waited_s:.1f} s: {error.message}; {mend}, or raise "
            "--join-timeout-s"
        )


@contextmanager
def suggesting_fixes(address: str, *, role: str) -> Iterator[None]:
    """Say which option of a daemon to change after a refusal by the server."""
    try:
        yield
    except NotFoundError as error:
        raise NotFoundError(f"{address}: {error.message}; check --run-id and --join") from error
    except PreconditionError as error:
        if error.metadata.get("reason") == "name_in_use":
            raise NameInUse(error.message) from error
        raise InvalidArgumentError(f"{address}: {error.message}; give --run-id") from error
    except (UnauthenticatedError, PermissionError_) as error:
        raise type(error)(
            f"{address}: {error.message}; give --token-file, or --join-file, with a token of the role `{role}` for "
            "this run"
        ) from error
    except UnimplementedError as error:
        raise UnimplementedError(f"{address} is no dataflow server: {error.message}; check --join") from error
