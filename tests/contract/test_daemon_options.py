"""The options of the daemons: every setting is one, named like it, explained, in a panel."""

import importlib
import json
import subprocess
import sys
from typing import Any

import pytest
import typer

from astraflow_dataflow.settings import DataflowServerSettings
from astraflow_engine.settings import EngineSettings
from astraflow_environment.settings import EnvironmentSettings
from astraflow_kit.setting_names import NAMES
from astraflow_kit.settings import ProcessSettings
from astraflow_raas.settings import NodeSettings
from astraflow_trainer.settings import TrainerSettings

DAEMONS: dict[str, type[ProcessSettings]] = {
    "dataflow": DataflowServerSettings,
    "raas": NodeSettings,
    "trainer": TrainerSettings,
    "engine": EngineSettings,
    "environment": EnvironmentSettings,
}
HIDDEN = {"failpoints", "failpoints_seed", "failpoints_log", "share_port"}
# Names that are not the setting's own with dashes: people and scripts use them.
SERVING = ("dataflow", "raas", "trainer", "environment")
OTHER_NAMES = {
    **{(name, "grpc_port"): ["--port", "--grpc-port"] for name in SERVING},
    **{(name, "http_allowed_hosts"): ["--http-allowed-host"] for name in SERVING},
    ("raas", "engine_args"): ["--engine-arg"],
    ("trainer", "plan_json"): ["--json"],
    ("trainer", "recipe_overrides"): ["--set"],
    ("raas", "environments"): ["--environment"],
    ("environment", "with_"): ["--with"],
}


def options(name: str) -> dict[str, Any]:
    """The options of `astraflow NAME` by parameter."""
    app = importlib.import_module(f"astraflow_{name}.__main__").app
    return {parameter.name: parameter for parameter in typer.main.get_command(app).params}


@pytest.mark.parametrize("name", DAEMONS)
def test_every_setting_is_an_option_named_like_it_explained_in_a_panel_and_shown(name: str) -> None:
    found = options(name)
    assert {setting: option.opts for setting, option in found.items() if setting != "check"} == {
        setting: OTHER_NAMES.get((name, setting), [f"--{setting.replace('_', '-')}"])
        for setting in DAEMONS[name].model_fields
    }
    assert {setting for setting, option in found.items() if option.hidden} == HIDDEN & found.keys()
    assert [key for key, option in found.items() if len(option.help) < 8 or not option.rich_help_panel] == []


def test_the_names_of_all_settings_are_in_one_table() -> None:
    """By which a daemon knows that a variable is another one's, and no misspelling of its own."""
    of_daemons = {setting for kind in DAEMONS.values() for setting in kind.model_fields}
    assert of_daemons == NAMES


@pytest.mark.parametrize("name", DAEMONS)
def test_help_and_wrong_settings_wait_for_nothing_heavy(name: str) -> None:
    code = f"""
import json, sys
from astraflow_{name}.__main__ import app
for arguments in (["--help"], ["--log-level", "loud"]):
    try:
        app(arguments)
    except SystemExit as ended:
        print(ended.code, file=sys.stderr)
loaded = [heavy for heavy in ("torch", "grpc", "transformers", "boto3", "redis") if heavy in sys.modules]
print(json.dumps(loaded), file=sys.stderr)
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    *said, loaded = ended.stderr.splitlines()
    assert (said[0], said[-1]) == ("0", "2")
    assert json.loads(loaded) == []
