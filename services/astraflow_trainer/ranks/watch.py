"""Each rank knows at once when another one ends, and why.

Invariant: the first rank keeps one loopback or cluster connection to every other rank; a connection that
closes without a farewell means that its rank died, one without beats that its rank stands still; either ends
this one, whatever collective its threads are blocked in. Farewells carry the reason, so that all ranks end
with the same status. Messages are JSON lines. `rank_group` opens it, the trainer's server listens to it.
"""

import json
import math
import selectors
import socket
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from astraflow.errors import ERRORS_BY_REASON, AstraflowError, RequestError, StateError, UnavailableError
from astraflow_kit.awake import Silence
from astraflow_kit.log import get_logger

log = get_logger(__name__)

_MAX_LINE_BYTES = 65_536
_LOOK_S = 1.0


class RankLostError(UnavailableError):
    """Another rank of this trainer ended or does not answer: start the whole group again."""


@dataclass
class _Peer:
    """The other end of one connection."""

    index: int
    connection: socket.socket
    received: bytes = b""
    said_farewell: bool = False
    num_heard: int = 0
    silence: Silence = field(default_factory=lambda: Silence(period_s=_LOOK_S))


@dataclass
class RankWatch:
    """Connections to other ranks, and the thread that listens to them. Methods may be called from any thread."""

    index: int
    size: int
    connections: Mapping[int, socket.socket]
    silence_s: float = math.inf
    """A rank that has said nothing for so long is lost; each says something every third of it."""
    _failure: AstraflowError | None = None
    _known: threading.Event = field(default_factory=threading.Event)
    _saying: threading.Lock = field(default_factory=threading.Lock)
    _on_lost: Callable[[AstraflowError], object] = lambda _: None
    _on_stop: Callable[[], object] = lambda: None

    def start(
        self, *, on_lost: Callable[[AstraflowError], object], on_stop_wanted: Callable[[], object]
    ) -> None:
        """Listen from now on. `on_lost` is called once, `on_stop_wanted` when another rank was asked to stop."""
        self._on_lost, self._on_stop = on_lost, on_stop_wanted
        threading.Thread(target=self._listen, name="rank-watch", daemon=True).start()
        if math.isfinite(self.silence_s):
            threading.Thread(target=self._beat, name="rank-beat", daemon=True).start()

    def failure(self, *, wait_s: float) -> AstraflowError | None:
        """Why another rank ended, if one did, waiting a moment for its last message; None when all are alive."""
        self._known.wait(wait_s)
        return self._failure

    def ask_to_stop(self) -> None:
        """Tell the first rank, which decides for all, that this one was asked to stop."""
        self._say({"stop": True})

    def farewell(self, error: BaseException | None) -> None:
        """Tell the others that this rank ends, and why; None when it is done."""
        if error is None:
            self._say({"end": True})
            return
        reason = error.reason if isinstance(error, AstraflowError) else "INTERNAL"
        self._say({"reason": reason, "message": str(error)[:1000]})

    def _say(self, content: Mapping[str, object]) -> None:
        line = json.dumps({**content, "rank": self.index}).encode() + b"\n"
        for connection in self.connections.values():
            try:
                with self._saying:
                    connection.sendall(line)
            except OSError as error:
                # It is gone; this rank's own watch tells what that means.
                log.debug("rank.not_notified", error=str(error))

    def _beat(self) -> None:
        number = 0
        while not self._known.wait(min(2.0, self.silence_s / 3)):
            number += 1
            self._say({"beat": number})

    def _listen(self) -> None:
        with selectors.DefaultSelector() as selector:
            for index, connection in self.connections.items():
                connection.setblocking(True)
                selector.register(connection, selectors.EVENT_READ, _Peer(index, connection))
            while selector.get_map():
                for key, _ in selector.select(_LOOK_S):
                    if not self._hear(key.data):
                        selector.unregister(key.fileobj)
                for key in list(selector.get_map().values()):
                    self._expect(key.data)

    def _hear(self, peer: _Peer) -> bool:
        """Take in what one rank says; False when its connection is over."""
        try:
            data = peer.connection.recv(_MAX_LINE_BYTES)
        except OSError:
            data = b""
        *lines, peer.received = (peer.received + data).split(b"\n")
        peer.num_heard += len(lines)
        for line in lines:
            self._understand(peer, json.loads(line))
        if not data and not peer.said_farewell:
            self._lose(RankLostError(f"rank {peer.index} of {self.size} exited without reporting"))
        return bool(data) and len(peer.received) < _MAX_LINE_BYTES

    def _expect(self, peer: _Peer) -> None:
        if peer.silence.look(peer.num_heard) >= self.silence_s and not peer.said_farewell:
            self._lose(
                RankLostError(f"rank {peer.index} of {self.size} has stood still for {self.silence_s:g} s")
            )

    def _understand(self, peer: _Peer, content: Mapping[str, str]) -> None:
        if "beat" in content:
            return
        if "stop" in content:
            self._on_stop()
            return
        peer.said_farewell = True
        if "reason" in content:
            self._lose(_ended(f"rank {peer.index} of {self.size}", content))

    def _lose(self, error: AstraflowError) -> None:
        if self._failure is None:
            self._failure = error
            log.error("rank.lost", reason=error.reason, message=error.message)
            self._known.set()
            self._on_lost(error)


def _ended(who: str, content: Mapping[str, str]) -> AstraflowError:
    """An error that ends this rank with the status of the one that said it."""
    kind = ERRORS_BY_REASON.get(content["reason"], RankLostError)
    message = f"{who} ended: {content['message']}"
    return kind(message) if issubclass(kind, RequestError | StateError) else RankLostError(message)
