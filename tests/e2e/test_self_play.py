"""A policy and past versions of itself in one episode: the node serves what was drawn, also when that is older; as
adapters of one model, all in one engine.
"""

import json
import signal
from itertools import pairwise
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from astraflow.client import Client
from astraflow.commands.server import server_of_folder
from astraflow.connecting.connection import DialFiles
from astraflow.dataflow.v1.admin_service_pb2 import StatusRequest
from support.development import ROOT, RunFiles, dev, finish, wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

WORKFLOW = {
    "use": "astraflow_raas.workflows.two_player:TwoPlayer",
    "with": {"game": "longer_word:LongerWord"},
}
RIVAL = {
    "train": False,
    "model": {"snapshot": {"of": "solver", "every_versions": 1, "keep": 4, "draw": "rating"}},
    "sampling": {"max_new_tokens": 8},
}


def _logged(files: RunFiles, pattern: str, event: str) -> list[dict[str, object]]:
    lines = (
        line for path in (files.data_dir / "logs").glob(pattern) for line in path.read_text().splitlines()
    )
    return [
        entry
        for entry in map(json.loads, filter(lambda line: event in line, lines))
        if entry["event"] == event
    ]


def _served(files: RunFiles) -> list[int]:
    """The versions of the policy that the node served as its rival, one after the other."""
    announced = _logged(files, "dataflow*", "snapshot.announced")
    drawn = {entry["draw"]: int(str(entry["version"])) for entry in announced}
    activated = _logged(files, "node*", "weights.activated")
    return [drawn[entry["version"]] for entry in activated if entry["policy_id"] == "rival"]


def _went_back(versions: list[int]) -> bool:
    return any(later < earlier for earlier, later in pairwise(versions))


def _as_adapter() -> tuple[str, ...]:
    """The quickstart's policy as an adapter of a model that stays as it is."""
    recipe = YAML(typ="safe").load((ROOT / "recipes" / "quickstart" / "recipe.yaml").read_text())
    model = recipe["policies"]["solver"]["model"]
    model["warm_start"]["steps"] = 5
    base, adapter = {"train": False, "model": model}, {"lora": {"of": "base", "rank": 4, "alpha": 1}}
    return (
        *("--set", f"policies.base={json.dumps(base)}"),
        *("--set", f"policies.solver.model={json.dumps(adapter)}"),
        # Equals: one that always loses is always met as it was last.
        *("--set", "policies.rival.sampling.max_new_tokens=24"),
    )


@pytest.mark.parametrize(
    ("model", "engines"),
    [
        # Longer: a rival of its own engine loses against versions that differ less.
        pytest.param((), {"solver", "rival"}, id="whole", marks=pytest.mark.soak),
        pytest.param(_as_adapter(), {"base"}, id="adapter", marks=pytest.mark.ci),
    ],
)
def test_a_policy_trains_beside_snapshots_of_itself(
    tmp_path: Path, model: tuple[str, ...], engines: set[str]
) -> None:
    files = RunFiles(tmp_path)
    roles = ("--set", "roles.first=rival", "--set", "roles.second=solver")
    with dev(
        tmp_path,
        *("--steps", "1000", *roles),
        *("--set", f"policies.rival={json.dumps(RIVAL)}", *model),
        *("--set", f"raas.workflow={json.dumps(WORKFLOW)}"),
        *("--set", "raas.swap_seats=[first, second]"),
    ) as launcher:
        wait_for(lambda: files.steps_taken() >= 12 and _went_back(_served(files)), timeout_s=200)
        with Client(server_of_folder(files.data_dir).connection(DialFiles())) as client:
            status = client.call(client.admin.Status, StatusRequest())
        launcher.send_signal(signal.SIGINT)
        summary = finish(launcher, tmp_path)
    assert summary["conservation_error"] == 0
    (rival,) = [policy for policy in status.policies if policy.version.snapshot_of == "solver"]
    own, *met = rival.ratings
    assert sum(item.episodes for item in met) == own.episodes > 0
    assert len(met) > 1
    assert len(_served(files)) >= 3
    assert {entry["policy_id"] for entry in _logged(files, "node*", "engine.started")} == engines
