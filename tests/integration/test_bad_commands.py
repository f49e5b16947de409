"""Bad command lines, recipes and folders, as a table: the exit status, the words a person needs, and nothing made.

Status 2: what was given must change. 1: another run, release or program is in the way.
"""

import asyncio
import dataclasses
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from astraflow import cli
from astraflow.errors import AstraflowError
from astraflow_kit import lifecycle
from astraflow_kit.settings import load
from astraflow_trainer import server as trainer_server
from astraflow_trainer.settings import TrainerSettings
from support.cli import run
from support.dataflow_world import World
from support.recipes import TINY

pytestmark = [pytest.mark.integration, pytest.mark.slow]

QUICKSTART = str(Path(__file__).parents[2] / "recipes" / "quickstart")


@dataclasses.dataclass(frozen=True)
class Row:
    """A command line in a folder that `before` prepared."""

    arguments: tuple[str, ...]
    words: tuple[str, ...]
    status: int = 2
    before: Callable[[Path], object] = lambda folder: None


def dev(*arguments: str) -> tuple[str, ...]:
    """`astraflow dev` of the recipe beside the folder."""
    return ("dev", "../recipe", *arguments)


def check(*overrides: str) -> tuple[str, ...]:
    """`astraflow recipe check` with overrides."""
    return ("recipe", "check", "../recipe", *(word for override in overrides for word in ("--set", override)))


def run_json(text: str) -> Callable[[Path], object]:
    """A data dir that says this of itself."""

    def write(folder: Path) -> None:
        (folder / "data").mkdir()
        (folder / "data" / "run.json").write_text(text)

    return write


RECORD: dict[str, object] = {"schema_version": 2, "run_id": "other", "created": "2030-01-01T00:00:00"}
DATA = ("--data-dir", "data")

ROWS: dict[str, Row] = {
    # recipes
    "unknown key": Row(check("dataflow.group_sise=4"), ("dataflow.group_sise", "did you mean `group_size`?")),
    "unknown section": Row(check("datafow.group_size=4"), ("datafow", "did you mean `dataflow`?")),
    "wrong type": Row(check("run.steps=many"), ("run.steps", "valid integer", "got 'many'")),
    "out of bounds": Row(
        check("dataflow.group_size=0"), ("dataflow.group_size", "greater than or equal to", "got 0")
    ),
    "key that is missing": Row(check("policies={}"), ("policies",)),
    "recipe of a later release": Row(
        check("schema_version=2"),
        ("schema version 2", "this release reads 1", "use the release it was written for"),
    ),
    "override without a value": Row(check("run.steps"), ("--set run.steps: not of the form key.path=value",)),
    "missing recipe": Row(("dev", "nowhere"), ("no recipe at nowhere/recipe.yaml",)),
    "recipe that is not YAML": Row(
        ("recipe", "check", "."),
        ("recipe.yaml:1: not valid YAML",),
        before=lambda folder: (folder / "recipe.yaml").write_text("{"),
    ),
    # options
    "unknown command": Row(("trian",), ("no command 'trian'", "did you mean `trainer`?")),
    "nearly an option": Row(dev("--node", "2"), ("No such option: --node", "--nodes")),
    "option out of bounds": Row(dev("--steps", "0"), ("--steps", "greater than or equal to 1")),
    "no node": Row(
        dev("--nodes", "0"), ("--nodes 0 leaves no node to run tasks; give more, or --without raas",)
    ),
    "no such engine": Row(dev("--engine", "vllm"), ("must be `cpu`, `sglang` or the http:// address",)),
    "engine that is not installed": Row(
        dev("--engine", "sglang"),
        ("has no module sglang", "/opt/sglang/bin/pip install sglang", "--engine-python"),
    ),
    "environment without a port": Row(
        dev("--environment", "Game=10.0.0.9"), ("'Game=10.0.0.9' is not NAME=HOST:PORT",)
    ),
    "more nodes than there may be": Row(dev("--nodes", "65"), ("--nodes",)),
    "part that is none": Row(
        dev("--without", "redis"), ("'redis' is not one of 'dataflow', 'raas', 'trainer'",)
    ),
    "bad condition": Row(dev("--until", "soon"), ("--until 'soon' is not a condition; write heldout>=0.7",)),
    # folders
    "data dir of another recipe": Row(
        dev(*DATA),
        ("holds run 'other' of another recipe", "give another --data-dir"),
        status=3,
        before=run_json(json.dumps(RECORD)),
    ),
    "data dir of a later release": Row(
        dev(*DATA),
        ("schema version 99", "reads 2 and 3", "a later release", "give a new --data-dir"),
        status=3,
        before=run_json(json.dumps(RECORD | {"schema_version": 99})),
    ),
    "damaged data dir": Row(
        dev(*DATA), ("data/run.json is damaged", "give another --data-dir"), status=3, before=run_json("{")
    ),
    "data dir that is a file": Row(
        dev(*DATA),
        ("data cannot be used for the run", "give a --data-dir that can be written"),
        before=lambda folder: (folder / "data").write_text(""),
    ),
    # daemons
    "port that is none": Row(
        ("dataflow", "--redis", "redis://127.0.0.1:1", "--port", "65536"),
        ("option grpc_port = 65536", "less than or equal to 65535"),
    ),
    "server without its data": Row(("dataflow",), ("ASTRAFLOW_REDIS", "required")),
    "Redis without a scheme": Row(("dataflow", "--redis", "localhost"), ("option redis = 'localhost'",)),
    "trainer without a server": Row(("trainer",), ("neither of join and join_file", "ASTRAFLOW_JOIN")),
    "address that is none": Row(
        ("raas", "--join", "http://host"), ("join: address 'http://host'", "HOST:PORT")
    ),
    "reachable without protection": Row(
        ("dataflow", "--redis", "redis://127.0.0.1:1", "--host", "0.0.0.0"),
        ("host '0.0.0.0' is reachable", "bind 127.0.0.1, or accept the risk"),
    ),
    "failpoint that is none": Row(
        ("trainer", "--join", "h:1"),
        ("ASTRAFLOW_FAILPOINTS = 'nowhere=kill'", "nowhere"),
        before=lambda _: os.environ.__setitem__("ASTRAFLOW_FAILPOINTS", "nowhere=kill"),
    ),
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder commands run in, beside a recipe."""
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "recipe.yaml").write_text(TINY)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("ASTRAFLOW_FAILPOINTS", "")  # put back whatever a row sets
    return tmp_path / "here"


@pytest.mark.parametrize("row", ROWS)
def test_a_bad_command_says_what_to_change_and_makes_nothing(folder: Path, row: str) -> None:
    wanted = ROWS[row]
    wanted.before(folder)
    before = files(folder)
    ended = run(*wanted.arguments)
    shown = " ".join(ended.errors.replace("│", " ").split())
    assert ended.status == wanted.status, shown
    assert [word for word in wanted.words if word not in shown] == [], shown
    assert "Traceback" not in shown
    assert files(folder) == before


def files(folder: Path) -> dict[str, bytes]:
    """What lies in a folder, but for the file by which a data dir is locked while it is looked at."""
    found = (path for path in folder.rglob("*") if path.is_file() and path.name != "lock")
    return {str(path): path.read_bytes() for path in found}


@pytest.mark.parametrize("name", [name for name in cli.COMMANDS if name != "recipe"])
def test_every_command_refuses_an_option_it_does_not_have(folder: Path, name: str) -> None:
    ended = run(name, "--no-such-option")
    assert ended.status == 2
    assert "No such option: --no-such-option" in ended.errors
    assert files(folder) == {}


@pytest.fixture
def taken() -> Iterator[int]:
    """A port somebody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    """`astraflow ARGUMENTS` as a process, to its end."""
    whole = [sys.executable, "-m", "astraflow.cli", *arguments]
    wide = os.environ | {"COLUMNS": "300"}
    return subprocess.run(whole, capture_output=True, text=True, timeout=100, check=False, env=wide)


@pytest.mark.parametrize("option", ["grpc-port", "http-port"])
def test_a_taken_port_names_its_holder_and_the_remedy(redis_url: str, taken: int, option: str) -> None:
    ended = command("dataflow", "--redis", redis_url, f"--{option}", f"{taken}")
    assert ended.returncode == 2
    words = (f"cannot listen on 127.0.0.1:{taken}", f"process {os.getpid()} (", "stop that process or choose")
    for word in (*words, option.replace("-", "_")):
        assert word in ended.stderr, ended.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ("--port", "{taken}"),
            ("dataflow ended with status 2", "process {pid} (", "choose another grpc_port"),
        ),
        (("--set", "run.dataset=recipe:Nothing"), ("PLUGIN_FAILED", "'recipe' has no 'Nothing'", "Known:")),
        (("--set", "run.dataset=no_such_package:Data"), ("PLUGIN_FAILED", "no_such_package")),
    ],
    ids=["port taken", "no such plug-in", "no such package"],
)
def test_a_development_run_that_cannot_begin_ends_all_it_started(
    tmp_path: Path, taken: int, arguments: tuple[str, ...], words: tuple[str, ...]
) -> None:
    known = {"taken": taken, "pid": os.getpid()}
    given = [argument.format(**known) for argument in arguments]
    ended = command("dev", QUICKSTART, "--data-dir", str(tmp_path / "run"), *given)
    assert ended.returncode == 2, ended.stderr
    assert [word for word in words if word.format(**known) not in ended.stderr] == [], ended.stderr
    assert "Traceback" not in ended.stderr
    commands = [" ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])]
    assert [command for command in commands if str(tmp_path) in command] == []


# Options of a trainer, and the words.
TRAINERS: dict[str, tuple[dict[str, object], tuple[str, ...]]] = {
    "unknown policy": ({"policy": "critic"}, ("'critic' is not in the recipe, which has solver", "--policy")),
    "token where none is known": ({"token_file": "token"}, ("a token was sent", "or send no token")),
    "token file that is missing": ({"token_file": "nowhere"}, ("nowhere cannot be read", "mount it")),
}


@pytest.mark.parametrize("row", TRAINERS)
async def test_a_trainer_that_cannot_join_says_why(world: World, folder: Path, row: str) -> None:
    given, words = TRAINERS[row]
    (folder / "token").write_text("secret")
    await world.create_run()
    options = {"join": world.address, "work_dir": folder / "work", **given}
    with pytest.raises(AstraflowError) as refused:
        await asyncio.to_thread(lambda: trainer_server.check(load(TrainerSettings, options)))
    assert lifecycle.exit_code_of(refused.value) == 2
    assert [word for word in words if word not in refused.value.message] == []
    assert (await world.status()).policies[0].trainer_epoch == 0
