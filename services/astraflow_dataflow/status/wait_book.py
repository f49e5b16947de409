"""Since when each wait of a run has lasted, as far as this process saw it. Called by reporting."""

from collections.abc import Iterable

from astraflow_dataflow.rules.waits import Wait


class WaitBook:
    """Remembers since when each wait has lasted. Times are milliseconds of Redis' clock."""

    def __init__(self) -> None:
        self._since_ms: dict[tuple[str, str, str], int] = {}

    def waited_ms(self, waits: Iterable[Wait], *, now_ms: int) -> list[tuple[Wait, int]]:
        """Return each wait with how long it has lasted, and forget those that are over."""
        current = {(wait.stage, wait.policy_id, wait.reason): wait for wait in waits}
        self._since_ms = {key: self._since_ms.get(key, now_ms) for key in current}
        return [
            (wait, max(0, now_ms - (wait.since_ms if wait.since_ms is not None else self._since_ms[key])))
            for key, wait in current.items()
        ]
