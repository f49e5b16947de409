"""`astraflow weights export` against a store that a real publisher filled: whole in a new folder, or not there."""

import errno
import json
from pathlib import Path
from unittest.mock import patch

import pytest
from safetensors import safe_open

from astraflow.errors import NotFoundError
from astraflow.recipe.model import ReferenceModel
from astraflow_kit.folder_lock import lock_folder
from astraflow_trainer.warm_start.starting_model import reference_model
from astraflow_weights.codec.tensors import Array
from astraflow_weights.mirror import checkpoint
from astraflow_weights.mirror.checkpoint import map_weights
from astraflow_weights.store.file import FileStore
from astraflow_weights.tools.export import export_version
from support.cli import Ended
from support.published_models import published, read_log
from support.weight_fixtures import Ask
from support.weight_models import POLICY, RUN, Models, same_model

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("quiet")]


@pytest.fixture(autouse=True)
def models(weight_store: FileStore) -> Models:
    """Versions 0 to 2."""
    return published(weight_store, 3)


def left_in(folder: Path) -> set[str]:
    """Names in a folder but for the store's."""
    return {path.name for path in folder.iterdir()} - {"weights"}


@pytest.mark.parametrize(("asked", "version"), [("1", 1), ("latest", 2)])
def test_a_version_is_exported_bit_by_bit(
    ask: Ask, tmp_path: Path, models: Models, asked: str, version: int
) -> None:
    told = ask("export", asked, "--to", str(tmp_path / "made" / "model"), "--json")
    assert told.status == 0, told.errors
    assert (told.json["run_id"], told.json["policy_id"], told.json["version"]) == (RUN, POLICY, version)
    assert told.json["num_tensors"] == len(models[version])
    folder = tmp_path / "made" / "model"
    assert same_model(map_weights(folder / "model.safetensors"), models[version])
    with safe_open(folder / "model.safetensors", "np") as file:
        assert file.metadata() == {"format": "pt"}
    assert [path.name for path in folder.parent.iterdir()] == ["model"], "nothing stays beside it"


def test_a_model_above_the_bound_is_split_with_an_index(
    weight_store: FileStore, tmp_path: Path, models: Models
) -> None:
    exported = export_version(
        weight_store, read_log(weight_store), version=2, to=tmp_path / "model", max_shard_bytes=4000
    )
    index = json.loads((tmp_path / "model" / "model.safetensors.index.json").read_text())
    shards = set(index["weight_map"].values())
    assert len(shards) > 1
    assert shards | {"model.safetensors.index.json"} == set(exported.files)
    assert index["metadata"]["total_size"] == sum(array.nbytes for array in models[2].values())
    joined: dict[str, Array] = {}
    for shard in shards:
        assert exported.files[shard] <= 4000 + 4096, "a header and no tensor more"
        joined |= map_weights(tmp_path / "model" / shard)
    assert same_model(joined, models[2])


def test_a_version_that_a_kl_term_compares_with_is_kept_when_the_store_has_it_no_more(
    weight_store: FileStore, tmp_path: Path, models: Models
) -> None:
    def found(version: int) -> Path:
        reference, log = ReferenceModel(version=version), read_log(weight_store)
        folders = {"folder": tmp_path / "references", "cache": tmp_path / "cache"}
        return reference_model(reference, log=log, **folders)

    first = found(1)
    assert same_model(map_weights(first / "model.safetensors"), models[1])
    for info in weight_store.list(f"{RUN}/{POLICY}/parts/"):
        weight_store.delete(info.key)
    assert found(1) == first
    with pytest.raises(
        NotFoundError, match="compares with version 3 of its policy, and the store has 3 of them"
    ):
        found(3)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["export", "9"], "it holds 0 to 2; look at `astraflow weights list`"),
        (["export", "newest"], "give a number, or `latest`"),
        (["export", "-1"], "No such option"),
    ],
)
def test_a_wrong_version_is_refused(ask: Ask, tmp_path: Path, arguments: list[str], words: str) -> None:
    refused(ask(*arguments, "--to", str(tmp_path / "model")), words)
    assert left_in(tmp_path) == set()


def test_a_folder_with_content_is_left_alone(ask: Ask, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine").touch()
    refused(ask("export", "1", "--to", str(tmp_path / "model")), "is not empty; name a new folder")
    refused(ask("export", "1", "--to", str(tmp_path / "model" / "mine")), "is not empty; name a new folder")
    refused(ask("export", "1", "--to", str(tmp_path / "model" / "mine" / "new")), "cannot be written")
    assert left_in(tmp_path) == {"model"}


def test_two_exports_to_one_place_do_not_mix(ask: Ask, tmp_path: Path) -> None:
    with lock_folder(tmp_path / ".model.export", remedy=""):
        ended = ask("export", "1", "--to", str(tmp_path / "model"))
    assert (ended.status, "is in use" in ended.errors) == (1, True), ended.errors
    assert ask("export", "1", "--to", str(tmp_path / "model")).status == 0, (
        "what was left there is no hindrance"
    )


def test_a_full_disk_leaves_no_folder(ask: Ask, tmp_path: Path) -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    with patch.object(checkpoint.os, "posix_fallocate", side_effect=full):
        ended = ask("export", "1", "--to", str(tmp_path / "model"))
    assert (ended.status, "there is no room" in ended.errors) == (75, True), ended.errors
    assert left_in(tmp_path) == set()


def test_a_missing_part_is_named_and_leaves_no_folder(
    ask: Ask, weight_store: FileStore, tmp_path: Path
) -> None:
    for info in weight_store.list(f"{RUN}/{POLICY}/parts/"):
        weight_store.delete(info.key)
    ended = ask("export", "1", "--to", str(tmp_path / "model"))
    assert (ended.status, "parts/" in ended.errors) == (1, True), ended.errors
    assert left_in(tmp_path) == set()


def test_an_interrupted_export_leaves_no_folder(
    weight_store: FileStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("astraflow_weights.tools.export._split", interrupt)
    with pytest.raises(KeyboardInterrupt):
        export_version(weight_store, read_log(weight_store), version=1, to=tmp_path / "model")
    assert left_in(tmp_path) == set()


def refused(ended: Ended, words: str) -> None:
    """It ended as what the caller must mend does, and says what."""
    assert (ended.status, words in ended.errors) == (2, True), ended.errors
