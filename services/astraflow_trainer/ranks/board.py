"""What the first rank shows the others outside collectives, for threads that run beside training.

Invariant: nobody waits for anybody here, so a rank that never looks holds nobody up; one message is kept, the newest.
Called by the threads that read batches ahead.
"""

from torch._C._distributed_c10d import Store

_NUMBER, _MESSAGE = "board/number", "board/message"


class Board:
    """One numbered message in the ranks' store. `show` is the first rank's; numbers ascend."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def show(self, number: int, message: bytes) -> None:
        """Replace what is there."""
        # Text, as torch's own types want it; each byte is a character.
        self._store.set(_MESSAGE, message.decode("latin-1"))
        self._store.set(_NUMBER, str(number))

    def seen(self, number: int) -> bytes | None:
        """The message of this number, or one that is just replacing it; None while there is an earlier one."""
        if not self._store.check([_NUMBER]) or int(self._store.get(_NUMBER)) != number:
            return None
        return self._store.get(_MESSAGE).decode().encode("latin-1")
