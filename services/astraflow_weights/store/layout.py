"""Names of the objects of one policy below the root of a store.

Invariant: every key of the weight path is made here, and ids that could climb out of their folder are
refused. The writer, the log and the mirror ask; nobody else builds or parses keys.

    <run>/<policy>/seq/<sequence:020d>.pb    log entries, created once
    <run>/<policy>/copies/<sequence:020d>.pb copies of log entries, created once
    <run>/<policy>/checkpoints/<sequence:020d>.pb
                                             the log below an entry, created once, deleted when three newer ones exist
    <run>/<policy>/merged/<base:020d>-<version:020d>.pb
                                             added paths: deltas over several versions, created once
    <run>/<policy>/snapshots/<version:020d>.pb
                                             added paths: snapshots made after the manifest, created once
    <run>/<policy>/parts/<sha256>.afwd       snapshot and delta parts, content-named
    <run>/<policy>/assets/<sha256>           config, tokenizer and other files, content-named
    <run>/<policy>/schemas/<sha256>          names, dtypes and shapes of the tensors, content-named
    <run>/<policy>/intents/<epoch:020d>-<nonce>.pb
                                             upload intents, deleted by their writers
    <run>/<policy>/leases/<holder>-<count:08d>.pb
                                             pull leases, deleted by their holders
    <run>/<policy>/tombstones/<round:020d>.pb
                                             names to be collected, created once, deleted after a day
    <run>/<policy>/swept/<round:020d>.pb     what was collected, created once
    <run>/<policy>/identity                  which run this is, created once
    <run>/<policy>/latest                    hint and copy of the newest manifest, overwritten
"""

import re

# Letters, digits and a few signs; must begin with a letter or digit, so never "." or "..".
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_KEY_SEGMENT = re.compile(r"[A-Za-z0-9_=+@-][A-Za-z0-9._=+@-]{0,254}")
_MAX_KEY_BYTES = 1024
_ENTRY_SUFFIX = ".pb"

WEIGHTS_FILE = "model.safetensors"
# Files of a checkpoint folder that the mirror writes itself.
RESERVED_FILES = frozenset({WEIGHTS_FILE})


def check_id(value: str, *, what: str) -> str:
    """Return `value` when it can be a run or policy id in a key. Raises ValueError."""
    if not _ID.fullmatch(value):
        raise ValueError(
            f"{what} {value!r} cannot be used in object keys; use 1 to 128 letters, digits, '.', '_' or '-', "
            "beginning with a letter or digit"
        )
    return value


def check_key(key: str) -> str:
    """Return `key` when it is a plain relative path of safe segments. Raises ValueError."""
    safe = all(_KEY_SEGMENT.fullmatch(segment) for segment in key.split("/"))
    if not safe or len(key) > _MAX_KEY_BYTES:
        raise ValueError(
            f"object key {key!r} is not allowed; use at most {_MAX_KEY_BYTES} characters of "
            "letters, digits and '._=+@-' in segments that do not begin with a dot, between single slashes"
        )
    return key


def check_file_name(name: str) -> str:
    """Return `name` when it can be a file beside the weights in a checkpoint folder. Raises ValueError."""
    if not _KEY_SEGMENT.fullmatch(name) or name in RESERVED_FILES:
        raise ValueError(
            f"asset name {name!r} is not allowed; use letters, digits and '._=+@-', no leading dot, "
            f"and none of {', '.join(sorted(RESERVED_FILES))}"
        )
    return name


class PolicyKeys:
    """The keys of one policy of one run."""

    def __init__(self, run_id: str, policy_id: str) -> None:
        """Raises ValueError for ids that cannot stand in a key."""
        self.run_id = check_id(run_id, what="run id")
        self.policy_id = check_id(policy_id, what="policy id")
        self.root = f"{run_id}/{policy_id}/"
        self.entries = f"{self.root}seq/"
        self.copies = f"{self.root}copies/"
        self.checkpoints = f"{self.root}checkpoints/"
        self.merged = f"{self.root}merged/"
        self.snapshots = f"{self.root}snapshots/"
        self.parts = f"{self.root}parts/"
        self.assets = f"{self.root}assets/"
        self.schemas = f"{self.root}schemas/"
        self.intents = f"{self.root}intents/"
        self.leases = f"{self.root}leases/"
        self.tombstones = f"{self.root}tombstones/"
        self.swept = f"{self.root}swept/"
        self.identity = f"{self.root}identity"
        self.latest = f"{self.root}latest"

    def entry(self, sequence: int) -> str:
        """Key of log entry `sequence`; keys sort like their numbers."""
        return f"{self.entries}{sequence:020d}{_ENTRY_SUFFIX}"

    def copy(self, sequence: int) -> str:
        """Key of a copy of log entry `sequence`."""
        return f"{self.copies}{sequence:020d}{_ENTRY_SUFFIX}"

    def checkpoint(self, sequence: int) -> str:
        """Key of the checkpoint of the entries below `sequence`; keys sort like their numbers."""
        return f"{self.checkpoints}{sequence:020d}{_ENTRY_SUFFIX}"

    def sequence_in(self, key: str) -> int | None:
        """Number of the log entry under `key`; None when it is no entry's key."""
        digits = key.removeprefix(self.entries).removesuffix(_ENTRY_SUFFIX)
        return int(digits) if digits.isdecimal() and key == self.entry(int(digits)) else None

    def merged_delta(self, base_version: int, version: int) -> str:
        """Key of the added path from `base_version` to `version`."""
        return f"{self.merged}{base_version:020d}-{version:020d}{_ENTRY_SUFFIX}"

    def snapshot(self, version: int) -> str:
        """Key of the added path from nothing to `version`; keys sort like their numbers."""
        return f"{self.snapshots}{version:020d}{_ENTRY_SUFFIX}"

    def part(self, sha256_hex: str) -> str:
        """Key of the part with that digest."""
        return f"{self.parts}{sha256_hex}.afwd"

    def intent(self, epoch: int, nonce: bytes) -> str:
        """Key of an upload intent; keys sort like their epochs."""
        return f"{self.intents}{epoch:020d}-{nonce.hex()}{_ENTRY_SUFFIX}"

    def lease(self, holder: bytes, count: int) -> str:
        """Key of a holder's pull lease number `count`."""
        return f"{self.leases}{holder.hex()}-{count:08d}{_ENTRY_SUFFIX}"

    def tombstone(self, number: int) -> str:
        """Key of the tombstone of round `number`; keys sort like their numbers."""
        return f"{self.tombstones}{number:020d}{_ENTRY_SUFFIX}"

    def sweep(self, number: int) -> str:
        """Key of the sweep of round `number`; keys sort like their numbers."""
        return f"{self.swept}{number:020d}{_ENTRY_SUFFIX}"

    def asset(self, sha256_hex: str) -> str:
        """Key of the asset with that digest."""
        return f"{self.assets}{sha256_hex}"

    def schema(self, sha256_hex: str) -> str:
        """Key of the schema with that digest."""
        return f"{self.schemas}{sha256_hex}"
