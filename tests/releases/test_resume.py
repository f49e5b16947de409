"""A data dir that an earlier release wrote, and was killed over, is continued by this one, or refused with status 3 and
the name of the release that can read it, which then goes on with it.
"""

from pathlib import Path

import pytest

from astraflow_dataflow.store.keys import READ_AS_IT_IS, SCHEMA_VERSION
from astraflow_kit.releases import RELEASES, Release
from support.audit import audit
from support.development import RUN_ID, RunFiles, dev, finish, wait_for
from support.releases import Tree, checked_out

pytestmark = [pytest.mark.e2e, pytest.mark.ci, pytest.mark.timeout(500)]

STEPS = 2


def kept(files: RunFiles) -> dict[str, bytes]:
    """Store, checkpoints and Redis of a run."""
    roots = [files.data_dir / name for name in (f"store/{RUN_ID}", "work/trainer-solver/checkpoints")]
    found = [path for root in roots for path in root.rglob("*") if path.is_file()]
    return {str(path): path.read_bytes() for path in found}


def trained_and_killed(folder: Path, tree: Tree, patch: pytest.MonkeyPatch) -> None:
    """A run of a release, killed in the middle of its third step or later."""
    files = RunFiles(folder)
    with patch.context() as of_the_release:
        of_the_release.setenv("PYTHONPATH", tree.paths)
        with dev(folder, "--steps", "50", recipe=tree.recipe):
            wait_for(lambda: files.steps_done() >= 2, what="two steps")
    wait_for(lambda: not files.processes(), what="the end of the run's processes")


def go_on(folder: Path, recipe: Path, *, steps: int) -> None:
    """The run goes on to a step by the release whose code is imported."""
    with dev(folder, "--steps", str(steps), recipe=recipe) as launcher:
        summary = finish(launcher, folder)
    assert (summary["steps"], summary["conservation_error"]) == (steps, 0)
    lines = RunFiles(folder).read_metrics("step")
    assert [line["step"] for line in lines] == list(range(1, steps + 1))


@pytest.mark.parametrize("release", RELEASES[-4:], ids=str)
def test_the_data_of_an_earlier_release_is_continued_or_refused(
    release: Release, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = RunFiles(tmp_path)
    with checked_out(release, tmp_path) as tree:
        trained_and_killed(tmp_path, tree, monkeypatch)
        steps = files.steps_taken() + STEPS
        if release.redis in (*READ_AS_IT_IS, SCHEMA_VERSION):
            go_on(tmp_path, tree.recipe, steps=steps)
            assert audit(tmp_path).violations == []
            return
        before = kept(files)
        with dev(tmp_path, "--steps", str(steps), recipe=tree.recipe) as launcher:
            launcher.communicate(timeout=100)
        said = files.stderr.read_text()
        assert launcher.returncode == 3, said
        assert f"has schema version {release.redis}, " in said
        assert f"{release} reads it: go on with that one" in said
        assert "other code" not in said
        assert kept(files) == before
        with monkeypatch.context() as of_the_release:
            of_the_release.setenv("PYTHONPATH", tree.paths)
            go_on(tmp_path, tree.recipe, steps=steps)
