"""A run that has ended, gone back to an older version and trained on: as a user of `astraflow dev` does it."""

from pathlib import Path

import pytest

from astraflow_weights.store import open_store
from support import cli, store_census
from support.audit import audit
from support.development import POLICY, RUN_ID, RunFiles, dev, finish

pytestmark = [pytest.mark.e2e, pytest.mark.ci, pytest.mark.timeout(600)]


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.soak), 2])
def test_a_run_goes_back_and_trains_on_with_every_trajectory_accounted_for(
    tmp_path: Path, ranks: int
) -> None:
    store = RunFiles(tmp_path).data_dir / "store"
    options = ("--trainer-ranks", str(ranks))
    with dev(tmp_path, "--steps", "3", *options) as launcher:
        finish(launcher, tmp_path, timeout_s=280)
    named = ("--store", store.as_uri(), "--run-id", RUN_ID, "--policy", POLICY, "--take-over", "--json")
    told = cli.run("weights", "rollback", "1", *named)
    assert told.status == 0, told.errors
    assert (told.json["version"], told.json["announced"]) == (4, False)
    with dev(tmp_path, "--steps", "5", *options) as launcher:
        summary = finish(launcher, tmp_path, timeout_s=280)
    assert summary["steps"] == 5
    assert audit(tmp_path).violations == []
    census = store_census.take(open_store(store.as_uri()), run_id=RUN_ID, policy_id=POLICY)
    assert census.steps == [0, 1, 2, 3, 3, 4, 5]
    assert [record.rollback_of for record in census.records] == [None, None, None, None, 1, None, None]
    assert census.records[4].model_root == census.records[1].model_root
    given_up = {record.model_root for record in census.records[2:4]}
    assert given_up.isdisjoint(record.model_root for record in census.records[4:])
    files = RunFiles(tmp_path)
    assert [line["step"] for line in files.read_metrics("step")] == [1, 2, 3, 4, 5]
    assert [line["version"] for line in files.read_metrics("version")] == list(range(7))
    assert [line["version"] for line in files.read_metrics("evaluation") if line["final"]] == [3, 6]
