"""A folder has one holder, known by name; its lock ends with the holder and is inherited by nobody."""

import errno
import fcntl
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from astraflow.errors import ConflictError, InvalidArgumentError
from astraflow_kit.folder_lock import lock_folder

REMEDY = "choose another folder"
HOLD = """
import sys, time
from pathlib import Path
from astraflow_kit.folder_lock import lock_folder
held = lock_folder(Path(sys.argv[1]), remedy="")
print("held", flush=True)
{then}
time.sleep(60)
"""


@contextmanager
def holder(folder: Path, *, then: str = "", said: str = "held") -> Iterator[subprocess.Popen[str]]:
    """A process that holds the folder, and then does something more."""
    command = [sys.executable, "-c", HOLD.format(then=then), str(folder), "redis://:hunter2@host"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        try:
            assert process.stdout is not None
            while process.stdout.readline().strip() != said:
                assert process.poll() is None
            yield process
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def test_a_second_process_is_refused_and_learns_who_holds_the_folder(tmp_path: Path) -> None:
    with holder(tmp_path) as first:
        with pytest.raises(ConflictError) as refused:
            lock_folder(tmp_path, remedy=REMEDY)
        said = refused.value.message
    assert f"{tmp_path} is in use by process {first.pid} (`-c {tmp_path}" in said
    assert re.search(r"since \d{4}-\d\d-\d\dT\d\d:\d\d:\d\d", said)
    assert said.endswith(REMEDY)
    assert "hunter2" not in said


def test_the_folder_of_a_killed_holder_is_free_at_once(tmp_path: Path) -> None:
    with holder(tmp_path) as first:
        first.kill()
        first.wait()
        lock_folder(tmp_path, remedy=REMEDY).release()


@pytest.mark.parametrize(
    "child",
    [
        "import subprocess; subprocess.Popen(['sleep', '60'], close_fds=False); print('child', flush=True)",
        "import os; os.fork() or (print('child', flush=True), time.sleep(60))",
    ],
    ids=["started", "forked"],
)
def test_a_child_that_outlives_the_holder_does_not_hold_the_folder(tmp_path: Path, child: str) -> None:
    with holder(tmp_path, then=child, said="child") as first:
        first.kill()
        first.wait()
        lock_folder(tmp_path, remedy=REMEDY).release()


def test_a_released_folder_can_be_taken_again_by_the_same_process(tmp_path: Path) -> None:
    for _ in range(2):
        with lock_folder(tmp_path / "new" / "folder", remedy=REMEDY) as lock:
            pass
        lock.release()


def test_a_holder_that_has_not_said_who_it_is_refuses_all_the_same(tmp_path: Path) -> None:
    descriptor = os.open(tmp_path / "lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    with pytest.raises(ConflictError, match="only just started"):
        lock_folder(tmp_path, remedy=REMEDY)
    os.close(descriptor)


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_refused_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(descriptor: int, kind: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(InvalidArgumentError, match=r"without locks .*nolock"):
        lock_folder(tmp_path, remedy=REMEDY)
