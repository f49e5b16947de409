"""Signing reads of an S3 store for nodes that hold no credentials of it.

Invariant: nothing but reads of one run is signed, with SigV4, and no address is said to live longer than the
credentials that signed it. Sends no request. The dataflow server calls it when it grants reads.
"""

from collections.abc import Sequence
from urllib.parse import urlsplit

from botocore.credentials import RefreshableCredentials
from botocore.exceptions import BotoCoreError, NoCredentialsError

from astraflow_weights.errors import StoreRefused
from astraflow_weights.settings import StoreSettings
from astraflow_weights.store.granted import ReadKind, SignedReads, StoreRead, check_read
from astraflow_weights.store.s3_requests import open_client, open_session

_SHORTEST_S = 30.0


class ReadSigner:
    """Signs with the credentials of this process. Thread-safe."""

    def __init__(self, settings: StoreSettings, *, life_s: float) -> None:
        """Raises StoreRefused when there are no credentials to sign with."""
        self._session = open_session(settings)
        self._client = open_client(self._session, settings)
        self._life_s = life_s
        if self._session.get_credentials() is None:
            raise StoreRefused(
                "reads of the store cannot be signed: no credentials are found; give store_credentials_file, or set "
                "up the default chain"
            )

    def sign(self, store_uri: str, reads: Sequence[StoreRead], *, run_id: str) -> SignedReads:
        """Sign reads of the run's own objects. Raises ValueError for others, StoreRefused when signing fails."""
        address = urlsplit(store_uri)
        root = f"{address.path.strip('/')}/".lstrip("/")
        checked = [check_read(read, run_id=run_id) for read in reads]
        valid_s = self._remaining_s()
        try:
            urls = [self._url(read, bucket=address.netloc, root=root, valid_s=valid_s) for read in checked]
        except (BotoCoreError, NoCredentialsError) as error:
            raise StoreRefused(
                f"reads of {store_uri} cannot be signed: {error}; check store_credentials_file or the default chain"
            ) from error
        return SignedReads(urls=tuple(urls), valid_s=valid_s)

    def _url(self, read: StoreRead, *, bucket: str, root: str, valid_s: float) -> str:
        named: dict[str, object] = {"Bucket": bucket}
        if read.kind is ReadKind.LIST:
            named |= {"Prefix": root + read.key, "StartAfter": root + read.after if read.after else ""}
        else:
            named["Key"] = root + read.key
        return self._client.generate_presigned_url(read.kind.value, Params=named, ExpiresIn=int(valid_s))

    def _remaining_s(self) -> float:
        """How long an address may live: no longer than what signs it, to within a half."""
        credentials, valid_s = self._session.get_credentials(), self._life_s
        while isinstance(credentials, RefreshableCredentials) and credentials.refresh_needed(int(valid_s)):
            if valid_s < 2 * _SHORTEST_S:
                raise StoreRefused(
                    f"the credentials that sign reads of the store end within {valid_s:.0f} s and were not renewed; "
                    "check the role or the service that issues them"
                )
            valid_s /= 2
        return valid_s
