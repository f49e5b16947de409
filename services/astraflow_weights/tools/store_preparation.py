"""Making a store ready for a run, before the run exists: its bucket is there and it keeps create-only writes.

Loaded by name by `astraflow runs create`, which is part of the public package.
"""

from astraflow_kit.settings import load
from astraflow_weights.daemon_settings import StoreAccess
from astraflow_weights.store import ObjectStore, open_store
from astraflow_weights.store.probing import probe_create_only


def prepare_store(uri: str) -> str:
    """Create the bucket when it is missing, and prove the store; returns what was done, for people.

    How to reach an S3 store comes from `ASTRAFLOW_STORE_*`. Raises StoreRefused or Unavailable, with the remedy.
    """
    store = open_store(uri, settings=load(StoreAccess).store)
    is_new = uri.startswith("s3:") and _make_bucket(store)
    probe_create_only(store)
    return f"{store.uri} keeps create-only writes" + (" (its bucket is new)" if is_new else "")


def _make_bucket(store: ObjectStore) -> bool:
    from astraflow_weights.store.s3 import S3Store  # boto3 is slow to import

    return isinstance(store, S3Store) and store.make_bucket()
