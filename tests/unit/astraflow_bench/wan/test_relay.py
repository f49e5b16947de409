"""The relay is compiled on the spot, and who cannot is told what to install. What it does: the integration tests."""

import shutil
import subprocess
from pathlib import Path

import pytest

from astraflow.errors import PreconditionError
from astraflow_bench.wan.relay import compiled_relay

USAGE = 64


def test_without_a_compiler_the_remedy_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(PreconditionError, match="apt-get install gcc"):
        compiled_relay(tmp_path)


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
@pytest.mark.parametrize(
    ("arguments", "says"), [([], "usage: delay_relay"), (["1", "1", "wan", "1000", "10"], "too small")]
)
def test_bad_arguments_are_refused_before_any_use(tmp_path: Path, arguments: list[str], says: str) -> None:
    binary = compiled_relay(tmp_path)
    done = subprocess.run([str(binary), *arguments], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == USAGE
    assert says in done.stderr
