"""Earlier releases as trees on this machine, whose daemons run in the same environment as those of this one."""

import os
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from astraflow_kit.releases import RELEASES, Release
from support.source_tree import REPOSITORY

_GIT = ("git", "-c", "safe.directory=*", "-C", str(REPOSITORY))


@dataclass(frozen=True)
class Tree:
    """The files of a release."""

    root: Path

    @property
    def recipe(self) -> Path:
        """Its quickstart."""
        return self.root / "recipes" / "quickstart"

    @property
    def paths(self) -> str:
        """PYTHONPATH for its daemons."""
        roots = ("clients/python", "services", "tests/e2e/plugins")
        return os.pathsep.join(str(self.root / each) for each in roots)

    @property
    def environment(self) -> Mapping[str, str]:
        """Variables of its daemons."""
        return {**os.environ, "PYTHONPATH": self.paths}


THIS = Tree(REPOSITORY)


@contextmanager
def checked_out(release: Release, folder: Path) -> Iterator[Tree]:
    """The tree of an earlier release, a worktree of git. A test whose commit is missing is skipped in a clone without
    history, which has none of them, and fails in any other.
    """
    if not _has(release):
        missing = f"{release} is not in this clone; fetch its whole history"
        pytest.fail(missing) if any(map(_has, RELEASES)) else pytest.skip(missing)
    root = folder / release.commit[:12]
    subprocess.run([*_GIT, "worktree", "add", "--quiet", "--detach", str(root), release.commit], check=True)
    try:
        yield Tree(root)
    finally:
        subprocess.run([*_GIT, "worktree", "remove", "--force", str(root)], check=True)


def _has(release: Release) -> bool:
    named = f"{release.commit}^{{commit}}"
    return not subprocess.run([*_GIT, "cat-file", "-e", named], capture_output=True, check=False).returncode


def newest_of_each_contract() -> list[Release]:
    """The newest release of each contract version, oldest first."""
    return list({release.contract: release for release in RELEASES}.values())
