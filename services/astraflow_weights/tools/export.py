"""Writes a stored version as a Hugging Face model folder, as `transformers` loads it, an adapter as `peft` does.

Invariant: the folder appears by one rename, after every part, asset and tensor was compared with the sealed manifest;
whatever goes wrong, there is no folder, and what was begun beside it is removed, at the latest by the next export to
the same place. Tensors keep their names and dtypes: versions consist of Hugging Face tensors. `astraflow weights
export`, and trainers that start from a version of another run, call it.
"""

import errno
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from astraflow.errors import InvalidArgumentError, ResourceExhaustedError
from astraflow_kit.folder_lock import lock_folder
from astraflow_weights.codec.tensors import specs_of
from astraflow_weights.durable import sync_file, sync_folder, write_synced
from astraflow_weights.mirror.checkpoint import create_weights_file, map_weights
from astraflow_weights.mirror.mirror import Mirror
from astraflow_weights.store import ObjectStore
from astraflow_weights.store.layout import WEIGHTS_FILE
from astraflow_weights.versions.log import VersionLog

MAX_SHARD_BYTES = 5 * 10**9
"""Larger models are split, as `save_pretrained` does."""
_INDEX_FILE = f"{WEIGHTS_FILE}.index.json"
_ADAPTER_CONFIG, _ADAPTER_FILE = "adapter_config.json", "adapter_model.safetensors"
"""What peft looks for."""


@dataclass(frozen=True, kw_only=True)
class ExportedVersion:
    """A version in a folder. `files` are names and bytes."""

    run_id: str
    policy_id: str
    version: int
    step: int
    folder: str
    files: dict[str, int]
    num_tensors: int
    model_root: str


def export_version(
    store: ObjectStore, log: VersionLog, *, version: int, to: Path, max_shard_bytes: int = MAX_SHARD_BYTES
) -> ExportedVersion:
    """Write a version into `to`, a folder that is empty or does not exist.

    Needs room for the model, twice for one that is split. Raises InvalidArgumentError when `to` cannot be written,
    ConflictError when another export writes it, ResourceExhaustedError when there is no room, and as `Mirror.advance`
    does.
    """
    to = to.absolute()
    with _explained(to):
        if to.exists() and (not to.is_dir() or any(to.iterdir())):
            raise InvalidArgumentError(f"{to} is not empty; name a new folder")
        to.parent.mkdir(parents=True, exist_ok=True)
        draft = to.with_name(f".{to.name}.export")
        with lock_folder(draft, remedy="wait for it, or name another folder"):
            try:
                model = draft / "model"
                shutil.rmtree(model, ignore_errors=True)
                built = Mirror(model).advance(store, log, target=version).directory
                num_tensors = _split(built, max_bytes=max_shard_bytes)
                if (built / _ADAPTER_CONFIG).exists():
                    (built / WEIGHTS_FILE).rename(built / _ADAPTER_FILE)
                sync_folder(built)
                built.replace(to)
            finally:
                shutil.rmtree(draft, ignore_errors=True)
        sync_folder(to.parent)
    record = log.record(version)
    return ExportedVersion(
        run_id=log.run_id,
        policy_id=log.policy_id,
        version=version,
        step=record.step,
        folder=str(to),
        files={path.name: path.stat().st_size for path in sorted(to.iterdir())},
        num_tensors=num_tensors,
        model_root=record.model_root.hex(),
    )


def _split(folder: Path, *, max_bytes: int) -> int:
    """Make shards and their index of a weights file that is larger than `max_bytes`; the number of tensors."""
    whole = folder / WEIGHTS_FILE
    tensors = map_weights(whole)
    if sum(array.nbytes for array in tensors.values()) <= max_bytes:
        return len(tensors)
    try:
        from huggingface_hub import split_state_dict_into_shards_factory
    except ModuleNotFoundError as error:
        raise InvalidArgumentError(
            f"a model above {max_bytes:,} bytes is split by huggingface_hub; run: pip install 'astraflow[raas]'"
        ) from error
    split = split_state_dict_into_shards_factory(
        tensors,
        get_storage_size=lambda array: array.nbytes,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=max_bytes,
    )
    for file_name, names in split.filename_to_tensors.items():
        own = {name: tensors[name] for name in names}
        create_weights_file(folder / file_name, specs_of(own))
        for name, target in map_weights(folder / file_name, "r+").items():
            target[...] = own[name]
        sync_file(folder / file_name)
    index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
    write_synced(folder / _INDEX_FILE, json.dumps(index, indent=2, sort_keys=True).encode() + b"\n")
    whole.unlink()
    return len(tensors)


@contextmanager
def _explained(to: Path) -> Iterator[None]:
    """What the file system refuses, as an error with a remedy."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise ResourceExhaustedError(
                f"there is no room for the version beside {to}; free some, or export to another disk"
            ) from error
        raise InvalidArgumentError(
            f"{error.filename or to} cannot be written: {error.strerror or error}; name another folder"
        ) from error
