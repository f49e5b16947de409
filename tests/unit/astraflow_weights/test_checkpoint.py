"""Checkpoint folders are what other tools expect, and damage in them is noticed."""

import json
from pathlib import Path

import numpy as np
import pytest
import safetensors
from hypothesis import given
from hypothesis import strategies as st

from astraflow_weights.checkpoint import (
    SCHEMA_VERSION,
    DamagedCheckpoint,
    VersionFile,
    map_model,
    read_version_file,
    write_checkpoint,
)
from support.weight_models import make_model, same_model

VERSION_FILE = VersionFile(
    schema_version=SCHEMA_VERSION,
    run_id="r",
    policy_id="p",
    version=3,
    manifest_sha256="aa",
    model_root="bb",
    assets={"config.json": "cc"},
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoint"
    write_checkpoint(folder, make_model(), assets={"config.json": b"{}"}, version_file=VERSION_FILE)
    return folder


def test_the_reference_reader_finds_every_tensor(folder: Path) -> None:
    model = make_model()
    codes = {np.dtype("uint16"): "BF16", np.dtype("float32"): "F32", np.dtype("uint8"): "U8"}
    found = dict(safetensors.deserialize((folder / "model.safetensors").read_bytes()))
    assert found.keys() == model.keys()
    for name, array in model.items():
        assert found[name]["dtype"] == codes[array.dtype]
        assert tuple(found[name]["shape"]) == array.shape
        assert bytes(found[name]["data"]) == array.tobytes()


def test_the_file_says_it_is_for_torch_as_loaders_require(folder: Path) -> None:
    with safetensors.safe_open(folder / "model.safetensors", framework="np") as file:
        assert file.metadata() == {"format": "pt"}


def test_it_is_read_back_bit_by_bit_and_read_only(folder: Path) -> None:
    model = map_model(folder)
    assert same_model(model, make_model())
    assert not any(array.flags.writeable for array in model.values())
    assert read_version_file(folder) == VERSION_FILE
    assert (folder / "config.json").read_bytes() == b"{}"


def test_an_existing_folder_is_not_written_into(folder: Path) -> None:
    with pytest.raises(FileExistsError):
        write_checkpoint(folder, make_model(1), assets={}, version_file=VERSION_FILE)
    assert same_model(map_model(folder), make_model())


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b'{"version": 3}', VERSION_FILE.model_dump_json().encode() + b"x"]
)
def test_a_damaged_version_file_is_noticed(folder: Path, content: bytes) -> None:
    (folder / "astraflow_version.json").write_bytes(content)
    with pytest.raises(DamagedCheckpoint):
        read_version_file(folder)


def test_a_version_file_of_another_schema_is_not_guessed_at(folder: Path) -> None:
    other = VERSION_FILE.model_copy(update={"schema_version": 2})
    (folder / "astraflow_version.json").write_text(other.model_dump_json())
    with pytest.raises(DamagedCheckpoint, match="schema version 2, not 1"):
        read_version_file(folder)


def header_of(tensor: object) -> bytes:
    text = json.dumps({"w": tensor}).encode()
    return len(text).to_bytes(8, "little") + text


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff" * 8,
        b"\x02" + bytes(7) + b"[]",
        header_of({"dtype": "BF16", "shape": [3], "data_offsets": [0, 6]}),
        header_of({"dtype": "F64", "shape": [0], "data_offsets": [0, 0]}),
        header_of({"dtype": "BF16", "shape": [2], "data_offsets": [4, 0]}) + bytes(8),
        header_of({"dtype": "BF16", "shape": [5], "data_offsets": [0, 8]}) + bytes(8),
        header_of({"dtype": "BF16", "shape": [-1], "data_offsets": [0, 3]}) + bytes(8),
        header_of("junk"),
    ],
)
def test_a_damaged_weights_file_is_noticed(folder: Path, content: bytes) -> None:
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(DamagedCheckpoint):
        map_model(folder)


@given(st.binary(max_size=200))
def test_random_bytes_raise_nothing_but_damaged_checkpoint(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    folder = tmp_path_factory.mktemp("random")
    (folder / "model.safetensors").write_bytes(len(content).to_bytes(8, "little") + content)
    with pytest.raises(DamagedCheckpoint):
        map_model(folder)
