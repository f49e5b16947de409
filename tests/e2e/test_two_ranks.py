"""A run whose trainer has two ranks, one of which dies while it uploads: nothing is lost, and both go on."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import torch

from astraflow_kit.ports import free_port
from astraflow_trainer.model.model import PolicyModel
from astraflow_trainer.publish.probing import Prober
from astraflow_trainer.ranks.reductions import OneRank
from astraflow_weights.codec.parts.reader import open_part
from astraflow_weights.codec.tiles.grid import PartKind
from astraflow_weights.mirror.checkpoint import map_model
from astraflow_weights.store.file import FileStore
from astraflow_weights.versions.log import VersionLog
from support.development import POLICY, RUN_ID, RunFiles, dev, finish, wait_for
from support.published_models import pulled, read_log
from support.tiny_models import load_reference, widened
from support.weight_models import same_model

# Each rank counts its own: both die at the first part of version 2, or one does and takes the other along.
WINDOW = "weights.publish.uploading"

pytestmark = [pytest.mark.e2e, pytest.mark.ci, pytest.mark.timeout(420)]


@dataclass(frozen=True)
class Run:
    """What one run left."""

    files: RunFiles
    summary: dict[str, Any]

    @cached_property
    def store(self) -> FileStore:
        return FileStore(self.files.data_dir / "store")

    @cached_property
    def log(self) -> VersionLog:
        return read_log(self.store, run_id=RUN_ID)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("ranks")
    # Each version makes a snapshot due, of the one that is published next.
    every = "trainer.publish.snapshot_every_versions=1"
    arguments = ("--steps", "4", "--trainer-ranks", "2", "--set", every)
    with dev(folder, *arguments, failpoints=f"{WINDOW}=kill@3") as launcher:
        return Run(RunFiles(folder), finish(launcher, folder, timeout_s=400))


def test_the_run_finishes_with_every_trajectory_accounted_for(run: Run) -> None:
    assert run.summary["steps"] == 4
    assert run.summary["conservation_error"] == 0


def test_a_rank_died_while_uploading_and_all_ranks_were_started_again(run: Run) -> None:
    assert any(hit.acted for hit in run.files.read_hits() if hit.name == WINDOW)
    starts = [child for child, _ in run.files.starts()]
    first, second = f"trainer-{POLICY}", f"trainer-{POLICY}-rank-1"
    assert starts.count(first) == starts.count(second) >= 2


def test_each_step_is_one_version_and_one_line_of_work(run: Run) -> None:
    assert [record.step for record in run.log.records] == sorted({record.step for record in run.log.records})
    trained = {line["step"]: line["trajectory_ids"] for line in run.files.read_ledger()}
    ids = [trajectory for step in trained.values() for trajectory in step]
    assert sorted(trained) == [1, 2, 3, 4]
    assert len(ids) == len(set(ids))


def test_every_version_has_parts_of_both_ranks(run: Run) -> None:
    assert len(run.log.records) >= 2
    for record in run.log.records:
        refs = record.snapshot or record.deltas[0].parts
        parts = [open_part(run.store.get(ref.key)) for ref in refs]
        schema = run.log.manifest(record.version).schema
        rows = [{(tile.spec.name, tile.start) for tile in part.tiles(schema)} for part in parts]
        assert len(parts) == 2
        assert not rows[0] & rows[1]
        assert {name for name, _ in rows[0]} & {name for name, _ in rows[1]}


def test_both_ranks_made_snapshots_behind_their_publications(run: Run) -> None:
    behind = [record for record in run.log.records if record.snapshot is None and record.offered_snapshot]
    assert behind
    for record in behind:
        parts = [open_part(run.store.get(ref.key)) for ref in record.offered_snapshot or ()]
        assert len(parts) == 2
        assert {part.head.kind for part in parts} == {PartKind.SNAPSHOT}
    assert [record for record in run.log.records if record.snapshot is not None] == run.log.records[:1]


def test_each_rank_fetched_at_most_three_fifths_of_every_batch(run: Run) -> None:
    steps = run.files.read_metrics("step")
    assert steps
    for step in steps:
        received = [step["fetched_bytes_rank_0"], step["fetched_bytes_rank_1"]]
        assert sum(received) == step["fetched_bytes"] > 0
        assert max(received) <= 0.6 * sum(received)


def test_the_node_serves_the_bytes_that_two_ranks_published(run: Run) -> None:
    node = next((run.files.data_dir / "work" / "node-1").rglob("model.safetensors")).parent
    assert same_model(map_model(node), pulled(run.store, run.log.records[-1].version, run_id=RUN_ID))


def test_two_ranks_publish_what_one_process_finds_that_their_bytes_answer(run: Run) -> None:
    version = run.log.records[-1].version
    bits = pulled(run.store, version, run_id=RUN_ID)
    checkpoint = next((run.files.data_dir / "work" / "node-1").rglob("model.safetensors")).parent
    policy = PolicyModel(load_reference(checkpoint))
    with torch.no_grad():
        for name, parameter in policy.hf_parameters():
            parameter.copy_(widened(bits[name]))
    assert all(run.log.manifest(record.version).probe for record in run.log.records)
    published, found = run.log.manifest(version).probe, Prober(policy, ranks=OneRank()).answers()
    assert published is not None
    assert found is not None
    for one, other in zip(published, found, strict=True):
        assert one.token_ids == other.token_ids
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)


def test_no_node_doubted_its_engine(run: Run) -> None:
    assert "engine.weights_differ" not in (run.files.data_dir / "logs" / "node-1.log").read_text()


def test_the_last_process_of_each_rank_ended_well(run: Run) -> None:
    for name in (f"trainer-{POLICY}", f"trainer-{POLICY}-rank-1"):
        lines = (run.files.data_dir / "logs" / f"{name}.log").read_text().splitlines()
        ends = [json.loads(line) for line in lines if '"daemon.ended"' in line]
        assert ends[-1]["exit_code"] == 0


def test_a_batch_that_fails_twice_alike_on_one_rank_is_quarantined_and_the_launch_goes_on(
    tmp_path: Path,
) -> None:
    loss = "policies.solver.trainer.algorithm.loss=stumbling:Stumbling"
    arguments = ("--steps", "3", "--trainer-ranks", "2", "--set", loss)
    with dev(tmp_path, *arguments, variables={"STUMBLED": str(tmp_path / "stumbled")}) as launcher:
        summary = finish(launcher, tmp_path, timeout_s=400)
    files = RunFiles(tmp_path)
    assert (summary["steps"], summary["conservation_error"]) == (3, 0)
    starts = [child for child, _ in files.starts()]
    assert starts.count(f"trainer-{POLICY}") == starts.count(f"trainer-{POLICY}-rank-1") == 3
    logs = {
        name: (files.data_dir / "logs" / f"{name}.log").read_text()
        for name in ("dataflow", f"trainer-{POLICY}")
    }
    assert logs["dataflow"].count('"event": "batch.quarantined"') == 1
    said = "2 of 2 times alike): loss plug-in 'stumbling:Stumbling' raised ValueError: this rank has stumbled"
    assert f"rank 1 of 2 ended: step 1 failed on batch solver-1-1 ({said}" in logs[f"trainer-{POLICY}"]


def test_torchrun_starts_the_ranks_of_a_trainer(tmp_path: Path) -> None:
    """The trainer that the launcher leaves out is started as on a cluster."""
    with dev(tmp_path, "--steps", "2", "--without", "trainer") as launcher:
        files = RunFiles(tmp_path)
        wait_for(lambda: (files.addresses / "node-1.json").exists(), what="the node's start")
        server = json.loads((files.addresses / "dataflow.json").read_text())["grpc"]
        command = (
            *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"),
            *("--master-addr", "127.0.0.1", "--master-port", str(free_port())),
            *("-m", "astraflow_trainer", "--join", server, "--allow-recipe-code"),
            *("--token-file", str(files.data_dir / "secrets" / "trainer.token")),
            *("--work-dir", str(files.data_dir / "work" / "by-hand")),
        )
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        with (tmp_path / "torchrun").open("w") as output:
            both = {"stdout": output, "stderr": output}
            started = subprocess.run(command, env=environment, timeout=300, check=False, **both)
        said = (tmp_path / "torchrun").read_text()
        assert started.returncode == 0, said[-4000:]
        assert sum("step.finished" in line for line in said.splitlines()) == 2 * 2
        # The checkpoint of the last step ends the run, and that the launcher.
        assert finish(launcher, tmp_path, timeout_s=120)["conservation_error"] == 0
    assert Run(files, {}).log.records
