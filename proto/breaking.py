"""Fails when the contracts break callers of what was released or landed before: `buf breaking` with a baseline.

The baseline is the newest release tag (`v1.2.3`) below this commit; before the first one the last landed main: where
this branch left origin/main or main, and on main itself the commit before. A clone without any of them has nothing to
compare with, and says so. A break that is meant raises `contract_version` in astraflow/server/v1/server_info.proto
above the baseline's, and is then reported but accepted. `make breaking` calls this.
"""

from __future__ import annotations

import io
import re
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PROTO_ROOT = Path(__file__).resolve().parent
REPOSITORY = PROTO_ROOT.parent
VERSION_FILE = Path("astraflow/server/v1/server_info.proto")
_BREAKS_FOUND = 100  # exit status of buf


@dataclass(frozen=True)
class Baseline:
    """What is compared with: a commit, and how it was found."""

    commit: str
    found_as: str


def main() -> int:
    """Compare the working tree with the baseline; returns 0 when no caller breaks, or all is declared."""
    baseline = find_baseline()
    if baseline is None:
        print(
            "breaking: nothing to compare with: this clone has no release tag, no main and no earlier commit"
        )
        return 0
    with tempfile.TemporaryDirectory() as scratch:
        landed = Path(scratch) / "proto"
        unpack(baseline.commit, into=Path(scratch))
        breaks = compare(landed)
        if not breaks:
            print(f"breaking: none since {baseline.found_as}")
            return 0
        print(f"breaking: against {baseline.found_as}\n{breaks}")
        before, now = contract_version(landed), contract_version(PROTO_ROOT)
    if now > before:
        print(f"breaking: declared, the contract version rose from {before} to {now}")
        return 0
    print(
        f"breaking: callers of contract version {before} would fail. Keep the old form beside the new one, or declare "
        f"the break: raise contract_version above {before} in proto/{VERSION_FILE} and name it in CHANGELOG.md"
    )
    return 1


def find_baseline() -> Baseline | None:
    """Return the newest of what callers rely on already, None when this clone does not have it."""
    head = git("rev-parse", "HEAD")
    for commit, found_as in _candidates():
        if commit and (commit != head or git("status", "--porcelain", "--", "proto")):
            return Baseline(commit, f"{found_as} ({commit[:12]})")
    return None


def _candidates() -> Iterator[tuple[str, str]]:
    tag = git("describe", "--tags", "--abbrev=0", "--match", "v[0-9]*")
    yield git("rev-parse", f"{tag}^{{commit}}") if tag else "", f"release {tag}"
    for branch in ("origin/main", "main"):
        yield git("merge-base", "HEAD", branch), f"the last commit shared with {branch}"
    yield git("rev-parse", "--verify", "--quiet", "HEAD^"), "the commit before"


def git(*arguments: str) -> str:
    """Output of a git command in this repository; empty when git refuses."""
    command = ["git", "-C", str(REPOSITORY), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def unpack(commit: str, *, into: Path) -> None:
    """Write `proto/` as it was in a commit below `into`."""
    command = ["git", "-C", str(REPOSITORY), "archive", commit, "proto"]
    archive = subprocess.run(command, capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as packed:
        packed.extractall(into, filter="data")


def compare(landed: Path) -> str:
    """Return what `buf breaking` finds against the contracts in `landed`, a line each; empty when nothing."""
    rules = REPOSITORY / "buf.yaml"
    command = [str(Path(sys.executable).parent / "buf"), "breaking", "--config", str(rules)]
    command += ["--against", str(landed.parent), "--against-config", str(rules)]
    finished = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    if finished.returncode not in (0, _BREAKS_FOUND):
        raise SystemExit(f"buf breaking failed (exit {finished.returncode}):\n{finished.stderr}")
    return finished.stdout.strip()


def contract_version(contracts: Path) -> int:
    """Contract version of a folder of contracts; 0 for those from before there was one."""
    path = contracts / VERSION_FILE
    found = re.search(r"contract_version\) = (\d+);", path.read_text()) if path.exists() else None
    return int(found[1]) if found else 0


if __name__ == "__main__":
    sys.exit(main())
