"""The command line of an engine: loopback, a numbered version, and what the operator added."""

import itertools
from pathlib import Path

import pytest

from astraflow_raas.engine.command import EngineCommand


def command(kind: str, *, threads: int = 1) -> EngineCommand:
    python, extra = Path("/opt/engine/bin/python"), ("--mem-fraction-static", "0.8")
    sizes = {"max_running_requests": 128, "num_threads": threads, "seed": 7}
    return EngineCommand(kind=kind, python=python, extra_args=extra, **sizes)


MODULES = {"astraflow_engine": "astraflow_engine", "sglang": "sglang.launch_server"}


@pytest.mark.parametrize(("kind", "module"), MODULES.items())
def test_every_engine_listens_on_loopback_under_a_numbered_version(kind: str, module: str) -> None:
    argv = command(kind).argv(model_dir=Path("/mirror/v3"), version=3, port=4567)
    assert argv[:3] == ["/opt/engine/bin/python", "-m", module]
    options = dict(zip(argv[3::2], argv[4::2], strict=False))
    assert (options["--host"], options["--port"]) == ("127.0.0.1", "4567")
    assert (options["--model-path"], options["--weight-version"]) == ("/mirror/v3", "3")
    assert argv[-2:] == ["--mem-fraction-static", "0.8"]


def test_the_embedded_engine_gets_slots_threads_and_seed() -> None:
    argv = command("astraflow_engine", threads=2).argv(model_dir=Path("m"), version=0, port=1)
    options = dict(itertools.pairwise(argv))
    asked = options["--max-running-requests"], options["--num-threads"], options["--seed"]
    assert asked == ("128", "2", "7")


def test_a_thread_count_of_zero_is_left_to_the_engine() -> None:
    argv = command("astraflow_engine", threads=0).argv(model_dir=Path("m"), version=0, port=1)
    assert "--num-threads" not in argv
    assert command("sglang", threads=0).environment({"A": "1"}) == {"A": "1"}
    assert command("sglang", threads=3).environment({"A": "1"}) == {"A": "1", "OMP_NUM_THREADS": "3"}
