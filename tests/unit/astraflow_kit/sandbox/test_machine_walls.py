"""What a program sees, writes and leaves that uses the machine as it is."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from astraflow.plugins import MissingCapability
from astraflow_kit.sandbox.budget import Budget
from astraflow_kit.sandbox.machine_walls import MachineWalls, require_machine_walls
from support.sandbox import needs_bubblewrap

pytestmark = needs_bubblewrap
FULL = """
import os
def full(folder, size):
    try:
        for number in range(1000):
            with open(f"{folder}/full{number}", "wb") as file: file.write(bytes(size))
    except OSError as error:
        return error.errno
print(full("/tmp", 0), full(".", 10**5), full("..", 1), full("/var/tmp", 1), full("/dev/shm", 1))
"""
CHANGES = """
import os, stat
for top, _, files in (each for top in ("/proc", "/sys", "/dev", "/run", "/usr/bin", "/etc") for each in os.walk(top)):
    for path in (top, *(os.path.join(top, name) for name in files)):
        if not os.path.islink(path) and not path.startswith(("/dev/pts", "/dev/shm")):
            try:
                os.chmod(path, stat.S_IMODE(os.lstat(path).st_mode))
                print(path)
            except OSError:
                pass
for link in ("/proc/1/exe", "/proc/1/root"):
    try: os.chmod(link, 0o755); print(link)
    except OSError: pass
"""


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A folder with a task."""
    (tmp_path / "own" / "work").mkdir(parents=True)
    (tmp_path / "own" / "task").write_text("to do")
    return tmp_path / "own"


def run(source: str, own: Path, *, budget: Budget | None = None, **about: object) -> tuple[int, str]:
    """Status and words of a Python program in the work folder."""
    walls = MachineWalls(own=own, **about)  # type: ignore[arg-type]
    argv = walls.command_line(budget or Budget(), sys.executable, "-c", source, folder=own / "work")
    done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize(("megabytes", "files"), [(1, 5000), (100, 50)])
def test_all_that_it_may_write_is_of_one_budget(megabytes: int, files: int, own: Path) -> None:
    status, said = run(FULL, own, budget=Budget(disk_mb=megabytes, files=files))
    assert (status, said.split()[1:]) == (0, ["28"] * 4)  # no space left
    assert said.split()[0] == ("28" if files == 50 else "None")


def test_nothing_else_of_the_machine_can_be_changed(own: Path) -> None:
    assert run(CHANGES, own) == (0, "")


def test_its_folder_has_copies_and_leaves_the_result_alone(own: Path) -> None:
    source = "print(open('../task').read()); open('../task', 'w'); open('x', 'w')"
    source += "; open('../result.json', 'w').write('7')"
    assert run(source, own) == (0, "to do\n")
    assert (own / "task").read_text() == "to do"
    assert (own / "result.json").read_text() == "7"
    assert list((own / "work").iterdir()) == []


@pytest.mark.parametrize("make", ["symlink('/etc/passwd', {})", "mkfifo({})", "mkdir({})"])
def test_a_result_that_is_no_file_becomes_a_folder(make: str, own: Path) -> None:
    source = "import os; os." + make.format("'../result.json'")
    assert run(source, own) == (0, "")
    assert (own / "result.json").is_dir()


def test_a_result_is_taken_to_its_limit(own: Path) -> None:
    assert run("open('../result.json', 'wb').truncate(2**25)", own) == (0, "")
    assert (own / "result.json").stat().st_size == 2**20


@pytest.mark.parametrize(("source", "status"), [("exit(3)", 3), ("import os; os.kill(os.getpid(), 11)", 139)])
def test_its_status_is_that_of_the_program(source: str, status: int, own: Path) -> None:
    assert run(source, own)[0] == status


def test_it_sees_its_own_processes_alone(own: Path) -> None:
    source = "import os; print(*sorted(int(name) for name in os.listdir('/proc') if name.isdecimal()), os.getppid())"
    assert run(source, own) == (0, "1 2 1\n")


def test_programs_and_network_of_the_machine_are_there(own: Path) -> None:
    source = (
        "import os, socket, subprocess; print(os.getuid(), socket.gethostname(), end=' ', flush=True); "
        "subprocess.run(['ls', '/usr/bin/env']); open('/dev/null', 'w').write('x')"
    )
    assert run(source, own) == (0, f"{os.getuid()} {os.uname().nodename} /usr/bin/env\n")
    assert (
        str(Path("/proc/self/ns/net").readlink())
        in run("import os; print(os.readlink('/proc/self/ns/net'))", own)[1]
    )


def file(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("secret")
    return path


def renewed(path: Path) -> Path:
    """As Kubernetes mounts secrets: a link to one in a folder that another takes the place of."""
    (path.parent / "..data").symlink_to(file(path.parent / "..1" / path.name).parent.name)
    path.symlink_to(Path("..data") / path.name)
    return path


READ = """
import sys
try: print(open({path!r}).read())
except OSError: print("hidden")
"""


@pytest.mark.parametrize("make", [file, renewed, lambda path: file(path / "in")])
def test_what_is_hidden_cannot_be_read(make: Callable[[Path], Path], tmp_path: Path, own: Path) -> None:
    secret = make(tmp_path / "beside" / "secret")
    path = secret / "in" if secret.is_dir() else secret
    for hidden, said in (((), "secret\n"), ((secret,), "hidden\n")):
        found = run(READ.format(path=str(path)), own, shown=(tmp_path / "beside",), hidden=hidden)
        assert found == (0, said)


def test_of_tmp_and_of_what_is_hidden_it_has_what_is_named(tmp_path: Path, own: Path) -> None:
    inner, beside = file(tmp_path / "hidden" / "inner" / "file"), file(tmp_path / "hidden" / "file")
    reads = "".join(READ.format(path=str(path)) for path in (inner, beside))
    assert run(reads, own, shown=(tmp_path,), hidden=(tmp_path / "hidden",))[1].split() == ["hidden"] * 2
    named = {"shown": (inner.parent,), "hidden": (tmp_path / "hidden",)}
    assert run(reads, own, **named)[1].split() == ["secret", "hidden"]
    writes = f"open({str(inner)!r}, 'w').write('changed')"
    assert "Read-only file system" in run(writes, own, **named)[1]
    assert run(writes, own, writable=(inner.parent,), hidden=(tmp_path / "hidden",)) == (0, "")
    assert inner.read_text() == "changed"


def test_a_machine_without_bubblewrap_is_told_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    require_machine_walls.cache_clear()
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(MissingCapability, match="no bwrap on PATH; install bubblewrap"):
        require_machine_walls()
