"""`astraflow dev` refuses what cannot work before it makes anything, and tells the end of a run by its status."""

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TextIO

import pytest

from astraflow_launcher.commands import local_run
from astraflow_launcher.run.development_run import Options, Part
from astraflow_launcher.run.folder import RunFolder
from astraflow_launcher.view.live import View
from astraflow_launcher.view.observation import Observation
from astraflow_launcher.view.summary import Summary, summarize
from support import cli
from support.cli import Ended
from support.recipes import TINY

DOCUMENTATION = Path(__file__).parents[4] / "docs" / "launcher.md"
OPTIONS_OF_OTHERS = {"--join", "--allow-recipe-code", "--token-file", "--work-dir", "--from"}
"""Of daemons, and of `recipe init`."""

Run = Callable[..., Ended]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """Runs `astraflow dev ARGUMENTS` in an empty folder beside a recipe."""
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "recipe.yaml").write_text(TINY)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr(local_run, "configure", _close)
    return partial(cli.run, "dev")


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Options]:
    """The options of runs that would have started; each misses the goal that it has."""
    seen: list[Options] = []

    class EndedRun:
        def __init__(self, options: Options, folder: RunFolder, view: View) -> None:
            del view
            self._root = folder.root
            seen.append(options)

        async def run(self) -> Summary:
            facts = {"wall_s": 1.0, "peak_pss_bytes": 0, "data_dir": str(self._root)}
            return summarize(Observation(), goal_met=None if seen[-1].goal is None else False, **facts)

    monkeypatch.setattr(local_run, "DevelopmentRun", EndedRun)
    return seen


def _close(role: str, *, log_format: str, stream: TextIO) -> None:
    """In place of the process's logging, which belongs to the tests."""
    del role, log_format
    stream.close()


def test_help_lists_every_option_of_the_documentation(run: Run) -> None:
    # Three sections are about other commands.
    others = r"(?ms)^## (Without the launcher|Scores without training|Variants of a recipe)$.*?(?=^## )"
    text = re.sub(others, "", DOCUMENTATION.read_text())
    documented = set(re.findall(r"--[a-z][a-z-]*", text)) - OPTIONS_OF_OTHERS
    assert len(documented) > 5
    shown = set(re.findall(r"--[a-z][a-z-]*", run("--help").output))
    assert documented - shown == set()


def test_options_reach_the_run_and_named_keys_the_recipe(run: Run, started: list[Options]) -> None:
    wanted = ("--steps", "3", "--seed", "7", "--nodes", "0", "--without", "raas", "--quiet")
    assert run("../recipe", *wanted).status == 0
    (options,) = started
    assert (options.loaded.recipe.run.steps, options.loaded.recipe.run.seed) == (3, 7)
    assert (options.num_nodes, options.without) == (0, frozenset({Part.RAAS}))


def test_a_run_ends_with_one_json_object_on_stdout_and_in_its_folder(run: Run, started: list) -> None:
    ended = run("../recipe", "--json", "--data-dir", "data")
    assert ended.json["data_dir"] == str(Path("data").resolve())
    assert Path("data/summary.json").read_text() == ended.output


def test_without_json_stdout_stays_empty(run: Run, started: list[Options]) -> None:
    ended = run("../recipe")
    assert (ended.status, ended.output, len(started)) == (0, "", 1)


def test_a_missed_goal_is_status_1(run: Run, started: list[Options]) -> None:
    assert run("../recipe", "--until", "heldout>=0.7").status == 1
    assert started[0].goal is not None


def test_a_dry_run_tells_what_would_be_started_and_starts_and_writes_nothing(
    run: Run, started: list[Options]
) -> None:
    options = ("--nodes", "2", "--port", "7070", "--steps", "9", "--redis", "redis://me:geheim@h:1/0")
    plan = run("../recipe", "--dry-run", "--json", *options, "--without", "trainer").json
    daemons = {daemon["name"]: daemon for daemon in plan["daemons"]}
    assert list(daemons) == ["redis", "dataflow", "node-1", "node-2"]
    assert daemons["dataflow"]["address"] == "127.0.0.1:7070, pages a free port"
    assert daemons["node-2"]["does"].startswith("cpu engines: 1 of ")
    assert daemons["node-2"]["folder"] == f"{plan['folder']}/work/node-2"
    assert [policy["steps"] for policy in plan["policies"]] == [9]
    assert (plan["continues"], plan["ends"]) == (False, "after the last step of every policy")
    page = run("../recipe", "--dry-run", *options).output
    assert "trainer-solver" in page
    assert "9 steps of " in page
    assert "geheim" not in page
    assert list(Path().iterdir()) == []
    assert started == []


def test_a_dry_run_looks_at_the_folder_that_is_there(run: Run, started: list[Options]) -> None:
    assert run("../recipe", "--data-dir", "run", "--quiet").status == 0
    assert run("../recipe", "--data-dir", "run", "--dry-run", "--json").json["continues"] is True
    refused = run("../recipe", "--data-dir", "run", "--seed", "7", "--dry-run")
    assert "holds run" in refused.errors


def test_an_option_that_stands_for_a_key_is_named_when_it_is_wrong(run: Run) -> None:
    refused = run("../recipe", "--steps", "99999999999")
    assert refused.status == 2
    assert "--steps 99999999999: run.steps:" in refused.errors
