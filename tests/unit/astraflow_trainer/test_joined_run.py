"""Joining a run: its recipe, policy, store and code, and the code only with leave."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from astraflow import errors
from astraflow.dataflow.v1 import run_pb2
from astraflow.recipe.file import CodeFile, bundle_digest
from astraflow_trainer import joined_run
from astraflow_trainer.joined_run import JoinedRun, JoinStopped, find_run, join_run
from support.scripted_batches import ScriptedBatches, serving
from support.scripted_dataflow import RECIPE, RUN_ID, a_run

SOURCE = b"ANSWER = 42\n"
DIGEST = bundle_digest([CodeFile("recipe.py", SOURCE)])
CODE = run_pb2.CodeBundle(files=[run_pb2.CodeFile(path="recipe.py", content=SOURCE)], sha256=DIGEST)
CRITIC = "  critic: {model: {path: elsewhere}, sampling: {max_new_tokens: 8}}\n"
TWO_POLICIES = RECIPE.replace("dataflow:", CRITIC + "dataflow:")


def _join(script: ScriptedBatches, work_dir: Path, **changes: Any) -> JoinedRun:
    options = {"policy_id": None, "allow_recipe_code": False} | changes
    return join_run(script.run, work_dir=work_dir, **options)


def test_the_run_brings_its_recipe_its_store_and_its_only_policy(tmp_path: Path) -> None:
    joined = _join(ScriptedBatches(run=a_run(store_uri="s3://bucket/run")), tmp_path)
    assert (joined.run_id, joined.policy_id, joined.store_uri) == (RUN_ID, "solver", "s3://bucket/run")
    assert joined.recipe.run.steps == 3
    assert joined.policy.model.path == "somewhere"
    assert joined.source.folder is None


def test_one_of_several_policies_must_be_named(tmp_path: Path) -> None:
    script = ScriptedBatches(run=a_run(recipe_yaml=TWO_POLICIES))
    assert _join(script, tmp_path, policy_id="critic").policy.model.path == "elsewhere"
    complaint = r"None is not in the recipe, which has solver, critic; .*--policy"
    with pytest.raises(errors.InvalidArgumentError, match=complaint):
        _join(script, tmp_path)


def test_an_unknown_policy_is_refused_even_when_there_is_only_one(tmp_path: Path) -> None:
    with pytest.raises(errors.InvalidArgumentError, match="'judge' is not in the recipe, which has solver"):
        _join(ScriptedBatches(), tmp_path, policy_id="judge")


def test_log_probs_for_the_archive_need_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asking = RECIPE.replace("dataflow: {", "dataflow: {archive: {trainer_logprobs: true}, ")
    assert asking != RECIPE
    script = ScriptedBatches(run=a_run(recipe_yaml=asking))
    assert _join(script, tmp_path).recipe.dataflow.archive is not None
    monkeypatch.setattr(joined_run, "find_spec", lambda _: None)
    with pytest.raises(errors.InvalidArgumentError, match=r"pip install 'astraflow\[archive\]'"):
        _join(script, tmp_path)
    without = asking.replace("trainer_logprobs: true", "share: 0.5")
    assert _join(ScriptedBatches(run=a_run(recipe_yaml=without)), tmp_path)


def test_what_only_the_trainer_reads_may_come_from_another_file(tmp_path: Path) -> None:
    changed = tmp_path / "changed.yaml"
    changed.write_text(RECIPE + "trainer: {optimizer: {learning_rate: 0.125}, algorithm: {loss: ppo_clip}}\n")
    joined = _join(ScriptedBatches(), tmp_path, recipe_file=changed)
    assert joined.policy.trainer.optimizer.learning_rate == 0.125
    assert "trainer.optimizer.learning_rate: 1e-06 → 0.125" in joined.changes
    assert 'trainer.algorithm.loss.kind: "m2po" → "ppo_clip"' in joined.changes
    assert _join(ScriptedBatches(), tmp_path).changes == ()


def test_single_keys_may_be_set_over_the_runs_recipe_or_the_file(tmp_path: Path) -> None:
    faster = ("trainer.optimizer.learning_rate=0.25",)
    alone = _join(ScriptedBatches(), tmp_path, overrides=faster)
    assert alone.policy.trainer.optimizer.learning_rate == 0.25
    assert alone.changes == ("trainer.optimizer.learning_rate: 1e-06 → 0.25",)
    changed = tmp_path / "changed.yaml"
    changed.write_text(RECIPE + "trainer: {optimizer: {learning_rate: 0.125, weight_decay: 0.5}}\n")
    both = _join(ScriptedBatches(), tmp_path, recipe_file=changed, overrides=faster)
    optimizer = both.policy.trainer.optimizer
    assert (optimizer.learning_rate, optimizer.weight_decay) == (0.25, 0.5)


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("run.seed=7", r"run.seed: 0 → 7"),
        ("trainer.optimizer.learning_rat=1", r"--set trainer.optimizer.learning_rat.*learning_rate"),
    ],
)
def test_a_key_that_others_read_or_nobody_is_refused(tmp_path: Path, override: str, says: str) -> None:
    with pytest.raises(errors.AstraflowError, match=says):
        _join(ScriptedBatches(), tmp_path, overrides=(override,))


def test_a_file_that_changes_more_or_is_none_is_refused(tmp_path: Path) -> None:
    changed = tmp_path / "changed.yaml"
    changed.write_text(RECIPE.replace("somewhere", "elsewhere"))
    with pytest.raises(errors.ConflictError, match=r'solver.model.path: "somewhere" → "elsewhere"'):
        _join(ScriptedBatches(), tmp_path, recipe_file=changed)
    with pytest.raises(errors.InvalidArgumentError, match=r"none.yaml cannot be read"):
        _join(ScriptedBatches(), tmp_path, recipe_file=tmp_path / "none.yaml")


def test_the_history_of_a_recipe_has_a_line_for_each_change_and_the_step_that_it_begins_with(
    tmp_path: Path,
) -> None:
    joined = _join(ScriptedBatches(), tmp_path)
    for changes, first_step in [((), 1), (("a: 1 → 2",), 4), (("a: 1 → 2",), 6), ((), 9), ((), 11)]:
        replace(joined, changes=changes).record_changes(tmp_path, first_step=first_step)
    lines = [json.loads(line) for line in (tmp_path / "recipe_changes.jsonl").read_text().splitlines()]
    assert [(line["first_step"], line["changes"]) for line in lines] == [(4, ["a: 1 → 2"]), (9, [])]
    assert all(line["user"] and line["time"] for line in lines)


def test_recipe_code_is_written_only_with_leave(tmp_path: Path) -> None:
    refused = _join(ScriptedBatches(run=a_run(code=CODE)), tmp_path)
    assert (refused.source.folder, list(tmp_path.iterdir())) == (None, [])
    allowed = _join(ScriptedBatches(run=a_run(code=CODE)), tmp_path, allow_recipe_code=True)
    assert allowed.source.folder == tmp_path / "recipe" / DIGEST.hex()
    assert (allowed.source.folder / "recipe.py").read_bytes() == SOURCE


def test_damaged_recipe_code_is_refused(tmp_path: Path) -> None:
    damaged = run_pb2.CodeBundle(files=CODE.files, sha256=b"\0" * 32)
    with pytest.raises(errors.RecipeError, match="digest"):
        _join(ScriptedBatches(run=a_run(code=damaged)), tmp_path, allow_recipe_code=True)
    assert not list(tmp_path.rglob("*.py"))


def test_a_recipe_this_trainer_cannot_read_names_its_run(tmp_path: Path) -> None:
    with pytest.raises(errors.RecipeError, match=f"run {RUN_ID}"):
        _join(ScriptedBatches(run=a_run(recipe_yaml=RECIPE.replace("steps: 3", "stepz: 3"))), tmp_path)


def test_a_server_and_a_run_that_come_late_are_awaited() -> None:
    script = ScriptedBatches()
    script.fail("GetRun", errors.UnavailableError("starting"))
    script.fail("GetRun", errors.NotFoundError("no run run-9 on this server"))
    with serving(script) as client, capture_logs() as lines:
        assert find_run(client, "run-9", patience_s=60).run_id == "run-9"
    assert [line["waiting_for"] for line in lines if line["event"] == "trainer.waits"] == ["server"]


def test_waiting_ends_with_the_remedy_or_when_a_stop_is_asked_for() -> None:
    script = ScriptedBatches()
    script.fail("GetRun", *[errors.NotFoundError("no run run-9 on this server, which has run-1")] * 3)
    with serving(script) as client:
        with pytest.raises(errors.UnavailableError, match=r"run-9.*has run-1; create it.*--join-timeout-s"):
            find_run(client, "run-9", patience_s=0.01)
        with pytest.raises(JoinStopped):
            find_run(client, "run-9", patience_s=60, stopped=lambda: True)


def test_what_waiting_cannot_mend_is_said_at_once() -> None:
    script = ScriptedBatches()
    script.info.oldest_contract_version = script.info.contract_version = 99
    with serving(script) as client, pytest.raises(errors.IncompatibleError, match="update the client"):
        find_run(client, "", patience_s=60)
