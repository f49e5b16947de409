"""Whether a checkpoint is what was written: a digest of each of its files, kept in the file that makes it whole.

Invariant: a file that says it is sealed was written by `sealed` and not changed since, and every file that it names has
the size and bytes it had then. xxh3 runs at memory speed and guards against faults, not attackers. `checkpoint` calls
it.
"""

import json
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from astraflow_weights.codec.tensor_hash import bytes_digest, file_digest

_SEAL = "seal"


class Damaged(ValueError):
    """A file of a checkpoint is missing or not what was written; the message names it."""


def digests_of(files: Sequence[Path]) -> dict[str, str]:
    """xxh3-128 of each file by name, as hex; several are read at once."""
    with ThreadPoolExecutor(max_workers=max(1, min(len(files), os.cpu_count() or 1))) as pool:
        return dict(zip((file.name for file in files), pool.map(file_digest, files), strict=True))


def require_unchanged(folder: Path, digests: Mapping[str, str]) -> None:
    """Read all files that `digests` names. Raises Damaged for the first that is not what it was."""
    try:
        found = digests_of([folder / name for name in digests])
    except OSError as error:
        raise Damaged(f"{error.filename} cannot be read: {error.strerror}") from error
    for name, digest in digests.items():
        if found[name] != digest:
            raise Damaged(f"{folder / name} has digest {found[name]}, but was written with {digest}")


def sealed(content: Mapping[str, object]) -> str:
    """`content` as JSON that carries a digest of itself."""
    return json.dumps({**content, _SEAL: _seal(content)})


def unsealed(path: Path) -> dict[str, Any]:
    """What `sealed` was given. Raises Damaged."""
    try:
        content = json.loads(path.read_bytes())
        seal = content.pop(_SEAL, None)
    except OSError as error:
        raise Damaged(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, AttributeError) as error:
        raise Damaged(f"{path} is not what was written: {error}") from error
    # Releases before digests sealed nothing: their schema version is what they are refused for.
    if seal is not None and seal != _seal(content):
        raise Damaged(f"{path} is not what was written: its seal is broken")
    return dict(content)


def _seal(content: Mapping[str, object]) -> str:
    return bytes_digest(json.dumps(content, sort_keys=True).encode())
