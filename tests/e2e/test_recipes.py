"""Every small size over real daemons, for two steps of models that have learned nothing: its policies, workflow, grader
and environment fit together. What is learned is measured by `astraflow study recipes`.
"""

import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvicorn

from astraflow.recipe.file import load_recipe
from astraflow_bench.studies.running import run_recipe
from astraflow_environment.adapters.search_service import PassageIndex, search_app
from astraflow_launcher.view.metrics_file import read_lines
from support.recipes import recipe_code
from support.sandbox import needs_bubblewrap
from support.source_tree import REPOSITORY

pytestmark = [pytest.mark.e2e, pytest.mark.soak, pytest.mark.timeout(600), needs_bubblewrap]

RECIPES = REPOSITORY / "recipes"
FILES = sorted(path.relative_to(RECIPES) for path in RECIPES.glob("*/small*.yaml"))
TOY = (
    "run.steps=2",
    "dataflow.group_size=2",
    "dataflow.groups_per_step=4",
    "dataflow.filters=[]",  # one that drops groups of equal rewards would drop them all
    "dataflow.evaluation={every_versions: 0, num_samples: 4, final_samples: 4}",
    "trainer.algorithm.drop_zero_advantage=false",
)


@pytest.fixture
def search_url() -> Iterator[str]:
    """A search service over the passages of the small size, on loopback."""
    index = PassageIndex(list(recipe_code("search").passages()))
    server = uvicorn.Server(uvicorn.Config(search_app(index), log_level="error"))
    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}/search"
        server.should_exit = True
        thread.join()


@pytest.mark.parametrize("file", FILES, ids=str)
def test_a_small_size_runs_to_its_end(file: Path, tmp_path: Path, search_url: str) -> None:
    recipe = load_recipe(RECIPES / file).recipe
    overrides = [*TOY, *(f"policies.{name}.model.warm_start.steps=3" for name in recipe.policies)]
    if recipe.trainer.algorithm.kl:
        overrides.append("trainer.algorithm.kl.reference.warm_start.steps=3")
    if file.parent.name == "search":
        overrides.append(f"raas.workflow.with.environment.with.url={search_url}")
    summary, _ = run_recipe(RECIPES / file, overrides=overrides, folder=tmp_path)
    assert (summary["steps"], summary["conservation_error"]) == (2, 0)
    assert summary["heldout_last"] is not None


def test_nodes_follow_by_whole_models_where_the_recipe_says_so(tmp_path: Path) -> None:
    overrides = [*TOY, "policies.solver.model.warm_start.steps=3", "trainer.publish.codec=full"]
    summary, root = run_recipe(RECIPES / "math" / "small.yaml", overrides=overrides, folder=tmp_path)
    versions = [line for line in read_lines(root / "metrics.jsonl") if line["kind"] == "version"]
    assert [(line["version"], line["delta_bytes"]) for line in versions] == [(0, 0), (1, 0), (2, 0)]
    assert all(line["snapshot_bytes"] for line in versions)
    assert (summary["steps"], summary["heldout_last"] is not None) == (2, True)
