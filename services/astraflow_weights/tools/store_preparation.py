"""Making a store ready for a run, before the run exists: its bucket is there, it keeps create-only writes, and it has
the versions that the run starts from.

Loaded by name by `astraflow runs create` and `fork`, which are part of the public package.
"""

from astraflow.errors import NotFoundError
from astraflow_kit.settings import load
from astraflow_weights.daemon_settings import StoreAccess
from astraflow_weights.store import ObjectStore, open_store
from astraflow_weights.store.probing import probe_create_only
from astraflow_weights.tools.located import read_policy
from astraflow_weights.versions.inspection import buildable


def prepare_store(uri: str) -> str:
    """Create the bucket when it is missing, and prove the store; returns what was done, for people.

    How to reach an S3 store comes from `ASTRAFLOW_STORE_*`. Raises StoreRefused or Unavailable, with the remedy.
    """
    store = open_store(uri, settings=load(StoreAccess).store)
    is_new = uri.startswith("s3:") and _make_bucket(store)
    probe_create_only(store)
    return f"{store.uri} keeps create-only writes" + (" (its bucket is new)" if is_new else "")


def require_version(uri: str, *, run_id: str, policy_id: str, version: int) -> None:
    """Raise NotFoundError unless the store has the version and every part of a path to it from nothing."""
    found = read_policy(uri, run_id=run_id, policy_id=policy_id)
    found.check_version(version)
    possible = buildable(found.log)
    if version not in possible:
        kept = [record.step for record in found.log.records if record.version in possible]
        raise NotFoundError(
            f"version {version} of policy {policy_id!r} of run {run_id!r} was collected: its parts are gone from "
            f"{uri}. Steps {min(kept, default=0)} to {max(kept, default=0)} can be had; pin what you may want later"
        )


def _make_bucket(store: ObjectStore) -> bool:
    from astraflow_weights.store.s3 import S3Store  # boto3 is slow to import

    return isinstance(store, S3Store) and store.make_bucket()
