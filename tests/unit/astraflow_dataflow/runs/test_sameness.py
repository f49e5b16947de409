"""A run that is created again is the existing one where author, code and store are; defaults do not count."""

import pytest

from astraflow.dataflow.v1 import run_pb2
from astraflow.errors import ConflictError
from astraflow_dataflow.runs.sameness import require_same
from support.recipes import tiny_recipe


def run_of(
    *overrides: str, defaults: tuple[str, ...] = (), written: bool = True, **fields: str
) -> run_pb2.Run:
    """A run as a release with these defaults creates it."""
    return run_pb2.Run(
        run_id="tiny",
        recipe_yaml=tiny_recipe(*defaults, *overrides).yaml_text,
        recipe_as_written=tiny_recipe(*overrides).written if written else "",
        store_uri=fields.get("store", "file:///store"),
        code=run_pb2.CodeBundle(
            files=[run_pb2.CodeFile(path="recipe.py", content=fields.get("code", "1").encode())]
        ),
    )


OLDER = ("dataflow.lease_ttl_s=7.5", "trainer.keep_checkpoints=9")


@pytest.mark.parametrize("written", [True, False], ids=["written is kept", "of an earlier release"])
def test_a_release_with_other_defaults_finds_the_run_that_an_earlier_one_created(written: bool) -> None:
    require_same(run_of(defaults=OLDER, written=written), asked=run_of())


def test_two_callers_that_keep_nothing_of_what_was_written_are_compared_by_what_they_resolved() -> None:
    plain = run_of(written=False)
    require_same(plain, asked=plain)
    with pytest.raises(ConflictError, match=r"dataflow.lease_ttl_s: 7.5 → "):
        require_same(run_of(defaults=OLDER, written=False), asked=plain)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (run_of("run.seed=3"), r"with another recipe \(run.seed: 0 → 3\); choose"),
        (run_of(code="2"), r"with another code \(changed: recipe.py\); choose"),
        (run_of(store="file:///moved"), r"with another store \(file:///store, not file:///moved\); choose"),
        (
            run_of("run.seed=3", code="2"),
            r"another recipe \(run.seed: 0 → 3\), another code \(changed: recipe.py\); choose",
        ),
    ],
)
@pytest.mark.parametrize("written", [True, False], ids=["written is kept", "of an earlier release"])
def test_only_what_differs_is_named(asked: run_pb2.Run, words: str, written: bool) -> None:
    with pytest.raises(ConflictError, match=words):
        require_same(run_of(defaults=OLDER, written=written), asked=asked)
