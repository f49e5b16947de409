"""Data of another release is refused by name of the release that reads it; every version that is written has a rule."""

import re
from typing import get_args

import pytest
from packaging.version import Version

from astraflow import __version__
from astraflow.connecting.compatibility import CONTRACT_VERSION
from astraflow_dataflow.store import keys
from astraflow_kit import releases
from astraflow_kit.lifecycle import ExitCode, exit_code_of
from astraflow_launcher.run import folder
from astraflow_trainer.model import checkpoint
from astraflow_weights.versions import manifest
from support.source_tree import source_modules

READ = {
    "redis": (*keys.READ_AS_IT_IS, keys.SCHEMA_VERSION),
    "data_dir": (2, folder.SCHEMA_VERSION),
    "checkpoint": (checkpoint.SCHEMA_VERSION,),
    "log": (manifest.SCHEMA_VERSION,),
}
# Not refused: what stands elsewhere too is read from there, and a recipe is its author's to change.
OTHERWISE = {
    "services/astraflow_weights/versions/checkpoint.py": "the entries are read",
    "services/astraflow_weights/mirror/state.py": "the weights are fetched again",
    "services/astraflow_archive/layout.py": "part of the folder's name: others lie beside it",
    "clients/python/astraflow/recipe/settings.py": "refused as a recipe, with status 2",
}


@pytest.mark.parametrize("kind", get_args(releases.Format))
@pytest.mark.parametrize("newer", [False, True], ids=["older", "newer"])
def test_data_of_another_schema_ends_with_3_and_names_what_was_found_and_what_is_read(
    kind: releases.Format, newer: bool
) -> None:
    reads = READ[kind]
    found = max(reads) + 1 if newer else min(reads) - 1
    error = releases.refuse("it", format_=kind, found=found, reads=reads, otherwise="start anew")
    assert exit_code_of(error) == ExitCode.SUPERSEDED
    assert (
        f"schema version {found}, astraflow {__version__} reads {' and '.join(map(str, reads))};"
        in error.message
    )
    assert error.message.endswith("go on with that one, or start anew")
    assert ("a later release reads it" in error.message) is newer


@pytest.mark.parametrize("release", releases.RELEASES, ids=str)
def test_a_refusal_names_the_newest_release_that_reads_the_data(release: releases.Release) -> None:
    error = releases.refuse("it", format_="redis", found=release.redis, reads=[99], otherwise="start anew")
    assert f"{release} reads it: go on" in error.message


def test_the_list_of_releases_goes_up_to_this_one() -> None:
    newest = releases.RELEASES[-1]
    assert Version(newest.version) < Version(__version__)
    assert all(re.fullmatch(r"[0-9a-f]{40}", release.commit) for release in releases.RELEASES)
    for kind, reads in READ.items():
        assert getattr(newest, kind) <= max(reads)
    assert newest.contract <= CONTRACT_VERSION


def test_every_version_of_written_data_has_a_rule() -> None:
    declared = {
        module.name for module in source_modules() if re.search(r"^SCHEMA_VERSION = ", module.source, re.M)
    }
    refused = {"astraflow_dataflow/store/keys.py", "astraflow_launcher/run/folder.py"}
    refused |= {"astraflow_trainer/model/checkpoint.py", "astraflow_weights/versions/manifest.py"}
    assert declared == {f"services/{name}" for name in refused} | set(OTHERWISE)
