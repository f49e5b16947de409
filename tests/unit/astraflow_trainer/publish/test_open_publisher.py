"""What a recipe says of publishing reaches the versions in the store."""

from pathlib import Path

import pytest

from astraflow.recipe.file import parse_recipe
from astraflow_kit.plugins import RecipeSource
from astraflow_trainer.joined_run import JoinedRun
from astraflow_trainer.publish.open_publisher import open_publisher
from astraflow_trainer.publish.published import HeldPart
from astraflow_weights.codec import peers, shards
from astraflow_weights.codec.tiles.grid import TileCodec
from astraflow_weights.store.file import FileStore
from astraflow_weights.versions.log import VersionLog
from support import scripted_dataflow, tiny_training, weight_models


@pytest.mark.parametrize(
    ("overrides", "codec"),
    [
        ([], TileCodec.RICE),
        (["trainer.publish.codec=rice_ctx"], TileCodec.RICE_CTX),
        (["trainer.publish.codec=full"], None),
    ],
    ids=["default", "rice_ctx", "full"],
)
def test_versions_are_coded_as_the_recipe_says(
    tmp_path: Path, make_policy: tiny_training.MakePolicy, overrides: list[str], codec: TileCodec | None
) -> None:
    store, (before, after) = FileStore(tmp_path / "store"), weight_models.adamw_like(2)
    recipe = parse_recipe(scripted_dataflow.RECIPE, overrides=overrides).recipe
    log = VersionLog(store, run_id="run-1", policy_id="solver")
    publisher = open_publisher(
        store,
        joined=JoinedRun("run-1", recipe, "solver", store.uri, source=RecipeSource()),
        epoch=1,
        peers=peers.OnePeer(),
        held=HeldPart(make_policy()),
        mirror_dir=tmp_path / "mirror",
        assets=(),
        log=log,
    )
    for step, model in enumerate((before, after)):
        publisher.publish(shards.whole(model), step=step)
    log.refresh()
    record = log.record(1)
    if codec is None:
        assert (record.delta_bytes, record.snapshot_bytes > 0) == (0, True)
    else:
        assert weight_models.codecs_of(store, record.deltas[0].parts) == {codec}
