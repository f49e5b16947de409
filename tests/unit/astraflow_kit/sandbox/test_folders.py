"""A folder of an untrusted program can be removed by whoever runs the node, and by links nothing else is."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from astraflow_kit.sandbox.folders import remove_tree

# What `go mod download` leaves, and worse: made and removed by the user who runs this.
PROGRAM = """
import os, sys
from pathlib import Path
sys.path[:0] = sys.argv[2:]
from astraflow_kit.sandbox.folders import remove_tree
folder = Path(sys.argv[1], "agent")
for mode, name in ((0o555, "mod"), (0, "closed"), (0o300, "unlisted")):
    (folder / name / "deep").mkdir(parents=True)
    (folder / name / "deep" / "file").write_text("x")
    (folder / name / "deep" / "file").chmod(0o444)
    (folder / name / "link").symlink_to("/etc")
    (folder / name / "deep").chmod(mode)
    (folder / name).chmod(mode)
folder.chmod(0o555)
remove_tree(folder)
assert not folder.exists()
remove_tree(folder)
"""


@pytest.mark.parametrize("user", ["this one", "another"])
def test_folders_without_permission_to_write_are_removed_by_their_owner(tmp_path: Path, user: str) -> None:
    prefix: list[str] = []
    home = tmp_path
    if user == "another":
        if os.getuid() != 0 or not shutil.which("setpriv"):
            pytest.skip("needs root to become another user")
        prefix = ["setpriv", "--reuid", "10001", "--regid", "10001", "--clear-groups"]
        home = Path("/tmp") / f"astraflow-{os.getpid()}"
        home.mkdir()
        os.chown(home, 10001, 10001)
    python = shutil.which("python3", path="/usr/bin") or sys.executable if prefix else sys.executable
    services = str(Path(__file__).parents[4] / "services")
    try:
        done = subprocess.run(
            [*prefix, python, "-c", PROGRAM, str(home), services], capture_output=True, text=True, check=False
        )
    finally:
        if prefix:
            shutil.rmtree(home)
    assert done.returncode == 0, done.stderr


def test_a_link_is_removed_and_what_it_leads_to_stays(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.mkdir(mode=0o555)
    (tmp_path / "link").symlink_to(kept)
    remove_tree(tmp_path / "link")
    (tmp_path / "agent").mkdir()
    (tmp_path / "agent" / "link").symlink_to(kept)
    remove_tree(tmp_path / "agent")
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]
    assert kept.stat().st_mode & 0o777 == 0o555
