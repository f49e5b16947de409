"""A store that cannot hold weights is refused before anything is built on it: by `astraflow doctor --store`, by
`astraflow dev --store`, by a trainer that starts and by `astraflow trainer --check`, each with remedy and status.
"""

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from typer.testing import CliRunner

from astraflow_kit.lifecycle import ExitCode
from astraflow_launcher.commands.doctor import app as doctor
from support import cli
from support.dataflow_world import World
from support.s3_server import S3Server

pytestmark = [pytest.mark.integration, pytest.mark.slow]

QUICKSTART = Path(__file__).parents[2] / "recipes" / "quickstart"


@dataclass(frozen=True)
class Row:
    """A store: its address, what a daemon is told of it, the words of the refusal, the status of a daemon."""

    uri: str
    environment: dict[str, str]
    words: tuple[str, ...]
    status: ExitCode = ExitCode.USAGE


NAMES = (
    *("ignores create-only", "bucket missing", "credentials missing"),
    *("unreachable", "folder in the way", "no store"),
)


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Row]]:
    """One bad store of each kind."""
    folder = tmp_path_factory.mktemp("stores")
    (folder / "file").write_text("")
    with S3Server(folder, ignore_create_only=True) as server:
        server.create_bucket("careless")
        reached = dict(server.environment)
        yield {
            "ignores create-only": Row(
                "s3://careless/x", reached, ("does not honour create-only PUT", "use a store that supports")
            ),
            "bucket missing": Row(
                "s3://missing/x", reached, ("s3://missing/x: NoSuchBucket", "create the bucket")
            ),
            "credentials missing": Row(
                "s3://careless/x",
                reached | {"ASTRAFLOW_STORE_CREDENTIALS_FILE": str(folder / "none")},
                ("Unable to locate credentials", "give store_credentials_file"),
            ),
            "unreachable": Row(
                "s3://careless/x",
                reached | {"ASTRAFLOW_STORE_ENDPOINT_URL": "http://127.0.0.1:9"},
                ("failed 6 times", "check that the store at http://127.0.0.1:9 is healthy"),
                ExitCode.UNAVAILABLE,
            ),
            "folder in the way": Row(
                (folder / "file" / "store").as_uri(),
                {},
                ("cannot be made: Not a directory", "owner, mode, free space"),
            ),
            "no store": Row(
                "gs://bucket", {}, ("'gs://bucket' is not understood", "use file:///path or s3://")
            ),
        }


@pytest.fixture(params=NAMES)
def row(request: pytest.FixtureRequest, rows: dict[str, Row], monkeypatch: pytest.MonkeyPatch) -> Row:
    """Each row in turn, its environment set."""
    found = rows[request.param]
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    for name, value in found.environment.items():
        monkeypatch.setenv(name, value)
    return found


def assert_said(row: Row, text: str) -> None:
    """Every word of the refusal is there."""
    assert [word for word in row.words if word not in text] == [], text


def test_the_doctor_names_what_is_wrong_and_the_remedy(row: Row) -> None:
    result = CliRunner().invoke(doctor, ["--store", row.uri, "--json"])
    finding = json.loads(result.stdout)[-1]
    assert (result.exit_code, finding["check"], finding["state"]) == (1, "weight store", "failed")
    assert_said(row, f"{finding['found']}; {finding['remedy']}")
    assert finding["remedy"]


def test_a_development_run_is_refused_before_it_makes_anything(
    row: Row, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    ended = cli.run("dev", str(QUICKSTART), "--store", row.uri)
    assert ended.status == row.status
    assert_said(row, ended.errors)
    assert list(tmp_path.iterdir()) == []


def trainer(world: World, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A trainer process, run to its end."""
    command = [sys.executable, "-m", "astraflow_trainer", "--join", world.address, "--work-dir", str(folder)]
    return subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=100, check=False)


@pytest.mark.parametrize("arguments", [(), ("--check",)], ids=["start", "check"])
@pytest.mark.parametrize("row", ["ignores create-only", "unreachable"], indirect=True)
async def test_a_trainer_ends_before_it_claims_the_policy(
    row: Row, world: World, tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    await world.create_run(store_uri=row.uri)
    ended = await asyncio.to_thread(trainer, world, tmp_path, *arguments)
    assert ended.returncode == row.status, ended.stderr
    assert_said(row, ended.stderr + ended.stdout)
    (policy,) = (await world.status()).policies
    assert policy.trainer_epoch == 0


def test_a_good_store_is_found_good(tmp_path: Path) -> None:
    result = CliRunner().invoke(doctor, ["--store", (tmp_path / "store").as_uri(), "--json"])
    assert json.loads(result.stdout)[-1]["state"] == "ok"
    assert not list((tmp_path / "store").rglob("probe/*"))
