"""`astraflow trainer --plan` says what a rank needs, from a recipe alone."""

import json
from pathlib import Path
from textwrap import dedent

import pytest
import transformers
from typer.testing import CliRunner, Result

from astraflow_trainer.__main__ import app

# Two embeddings; of two layers: q, k, v, o, three matrices of the MLP and two norms; the last norm.
_LLAMA = 2 * 64 * 32 + 2 * (2 * 32 * 32 + 2 * 16 * 32 + 3 * 32 * 64 + 2 * 32) + 32


@pytest.fixture(autouse=True)
def _output_without_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """A command's output is caught here, and a stack can only be written to a file."""
    monkeypatch.setattr("faulthandler.register", lambda *_, **__: None)


def _planned(*options: str) -> Result:
    return CliRunner().invoke(app, ["--plan", "--recipe", "quickstart", *options])


def test_the_table_has_each_use_with_its_arithmetic() -> None:
    found = _planned("--plan-ranks", "4", "--replicas", "2", "--plan-on", "cpu")
    assert found.exit_code == 0, found.output
    lines = found.stdout.splitlines()
    assert "parameters, 4 ranks, 2 replicas; a rank needs" in lines[0]
    masters = next(line for line in lines if line.startswith("masters"))
    assert masters.split()[1:6] == ["host", "1.1", "MiB", "4", "B"]
    assert [line.split()[1] for line in lines if line.startswith("total")] == ["device", "host"]


def test_as_json_the_totals_are_those_of_the_items() -> None:
    found = json.loads(_planned("--json").stdout)
    for memory in ("device", "host"):
        items = [item["num_bytes"] for item in found["items"] if item["memory"] == memory]
        assert sum(items) == found["total"][memory] > 0


def test_keys_that_are_set_are_reckoned_with() -> None:
    deeper = json.loads(
        _planned("--json", "--set", "policies.solver.model.architecture.num_hidden_layers=9").stdout
    )
    assert deeper["num_parameters"] > json.loads(_planned("--json").stdout)["num_parameters"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--plan-memory-gib", "0.01"], "of device memory a rank, and it has 10.2 MiB: masters "),
        (["--plan-ranks", "6", "--replicas", "4"], "set it to one of 1, 2, 3, 6"),
        (["--policy", "nobody"], "--policy is 'nobody'; quickstart trains "),
    ],
)
def test_what_cannot_be_is_refused(options: list[str], says: str) -> None:
    found = _planned(*options)
    assert found.exit_code == 2
    assert says in found.stderr


def test_a_model_that_is_a_folder_needs_its_configuration_alone(tmp_path: Path) -> None:
    config = transformers.AutoConfig.for_model(
        "llama", vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, intermediate_size=64,
    )  # fmt: skip
    config.save_pretrained(tmp_path / "model")
    recipe = tmp_path / "recipe.yaml"
    text = f"""
        run: {{name: planned, dataset: "recipe:Tasks", steps: 1}}
        policies: {{solver: {{model: {{path: "{tmp_path / "model"}"}}, sampling: {{max_new_tokens: 8}}}}}}
        raas: {{reward: "recipe:Reward"}}
    """
    recipe.write_text(dedent(text))
    found = CliRunner().invoke(app, ["--plan", "--recipe", str(recipe), "--json"])
    assert found.exit_code == 0, found.output
    assert json.loads(found.stdout)["num_parameters"] == _LLAMA
