"""Checkpoint folders are what other tools expect, and damage in them is noticed."""

import json
from pathlib import Path

import numpy as np
import pytest
import safetensors
from hypothesis import given
from hypothesis import strategies as st

from astraflow_weights.codec.tensors import specs_of
from astraflow_weights.mirror.checkpoint import DamagedCheckpoint, create_weights_file, map_model, map_weights
from support.weight_models import make_model, same_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    model = make_model()
    create_weights_file(path, specs_of(model))
    for name, array in map_weights(path, "r+").items():
        array[...] = model[name]
    return tmp_path


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


def test_an_existing_file_is_not_written_into(folder: Path) -> None:
    with pytest.raises(FileExistsError):
        create_weights_file(folder / "model.safetensors", specs_of(make_model(1)))
    assert same_model(map_model(folder), make_model())


def test_a_new_file_has_all_its_room_before_it_is_mapped(folder: Path) -> None:
    path = folder / "new.safetensors"
    create_weights_file(path, specs_of(make_model(rows=5000)))
    status = path.stat()
    assert status.st_blocks * 512 >= status.st_size > 5000 * 64 * 2


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
