"""Whether a token is accepted here and now: by the keys, the revocations and the clock of this server.

Invariant: keys and revocations are those of the files as they are now, without a restart. Built by `gate` and by the
pages; what it decides, `tokens` does.
"""

from collections.abc import Callable

from astraflow_kit.clock import Clock, SystemClock
from astraflow_kit.identity.keys import Keys, read_keys
from astraflow_kit.identity.tokens import Identity, read_revoked, refusal, shown_time, verify
from astraflow_kit.identity.watched import WatchedFiles
from astraflow_kit.settings import DaemonSettings

_SCHEME = "bearer "
_MAX_KNOWN = 4096
RevokedElsewhere = Callable[[], frozenset[str]]


class Verifier:
    """Accepts or refuses what callers send as `authorization`."""

    def __init__(
        self,
        settings: DaemonSettings,
        *,
        revoked: RevokedElsewhere = frozenset,
        clock: Clock | None = None,
    ) -> None:
        """`revoked` returns ids that were revoked otherwise than by the file. Raises SettingsError for a bad file."""
        keys_file, revoked_file = settings.token_keys_file, settings.revoked_tokens_file
        if keys_file is None:
            raise ValueError("without token_keys_file there is nothing to verify with")
        self._audience = settings.token_audience
        self._keys = WatchedFiles(keys_file, parse=lambda content: read_keys(content, where=str(keys_file)))
        self._revoked_file = (
            WatchedFiles(revoked_file, parse=lambda content: read_revoked(content.decode(errors="replace")))
            if revoked_file
            else None
        )
        self._revoked_elsewhere = revoked
        self._clock = clock or SystemClock()
        self._known: dict[str, tuple[Keys, Identity]] = {}

    def identify(self, authorization: str | None) -> Identity:
        """The caller. Raises UnauthenticatedError whose metadata `reason` says why not."""
        if authorization is None or not authorization.lower().startswith(_SCHEME):
            raise refusal(
                "missing",
                "this server needs `authorization: Bearer TOKEN`; give the client a token (token_file) or a join "
                "string that holds one",
            )
        token = authorization[len(_SCHEME) :].strip()
        now_s = self._clock.wall_time_s()
        identity = self._proved(token, now_s=now_s)
        if self._is_revoked(identity):
            raise refusal(
                "revoked",
                f"the token {identity.token_id} of {identity.subject!r} was revoked; ask this server's operator for "
                "a new one (astraflow token create)",
                of=identity,
            )
        return identity

    def _proved(self, token: str, *, now_s: float) -> Identity:
        """`verify`, whose signature costs more than the rest of a small call, once per token and set of keys."""
        keys = self._keys.current()
        proved_by, known = self._known.get(token, (None, None))
        if known is not None and proved_by is keys and now_s < known.expires_s:
            return known
        identity = verify(token, keys=keys, audience=self._audience, now_s=now_s)
        if len(self._known) >= _MAX_KNOWN:
            self._known.clear()
        self._known[token] = (keys, identity)
        return identity

    def ended(self, identity: Identity) -> str:
        """Why a call that was admitted must end now: its token expired or was revoked; empty when it need not."""
        if self._clock.wall_time_s() >= identity.expires_s:
            return f"the token of {identity.subject!r} expired at {shown_time(identity.expires_s)}"
        if self._is_revoked(identity):
            return f"the token {identity.token_id} of {identity.subject!r} was revoked"
        return ""

    def _is_revoked(self, identity: Identity) -> bool:
        in_file = self._revoked_file is not None and identity.token_id in self._revoked_file.current()
        return in_file or identity.token_id in self._revoked_elsewhere()
