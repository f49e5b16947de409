"""The command line of an engine: loopback, a numbered version, and what the operator added."""

import itertools
from pathlib import Path
from typing import Any

import pytest

from astraflow.errors import InvalidArgumentError
from astraflow.recipe import LoraSettings
from astraflow_raas.engine.command import EngineCommand, share_gpus

SAFE = {"PYTHONSAFEPATH": "1"}
"""An engine imports nothing of the folder that its node was started in."""


def command(
    kind: str, *, threads: int = 1, extra: tuple[str, ...] = ("--mem-fraction-static", "0.8"), **layout: Any
) -> EngineCommand:
    python = Path("/opt/engine/bin/python")
    sizes = {"max_running_requests": 128, "num_threads": threads, "seed": 7}
    return EngineCommand(kind=kind, python=python, extra_args=extra, **sizes, **layout)


KEY = Path("/node/engine.key")
MODULES = {"cpu": "astraflow_engine", "sglang": "sglang.launch_server"}


@pytest.mark.parametrize(("kind", "module"), MODULES.items())
def test_every_engine_listens_on_loopback_under_a_numbered_version(kind: str, module: str) -> None:
    argv = command(kind).argv(model_dir=Path("/mirror/v3"), version=3, port=4567, key_file=KEY)
    assert argv[:3] == ["/opt/engine/bin/python", "-m", module]
    options = dict(zip(argv[3::2], argv[4::2], strict=False))
    assert (options["--host"], options["--port"]) == ("127.0.0.1", "4567")
    assert (options["--model-path"], options["--weight-version"]) == ("/mirror/v3", "3")
    assert argv[-2:] == ["--mem-fraction-static", "0.8"]


def test_the_embedded_engine_gets_slots_threads_and_seed() -> None:
    argv = command("cpu", threads=2).argv(model_dir=Path("m"), version=0, port=1, key_file=KEY)
    options = dict(itertools.pairwise(argv))
    asked = options["--max-running-requests"], options["--num-threads"], options["--seed"]
    assert asked == ("129", "2", "7"), "one place more for the node's own probes"


def test_a_thread_count_of_zero_is_left_to_the_engine() -> None:
    argv = command("cpu", threads=0).argv(model_dir=Path("m"), version=0, port=1, key_file=KEY)
    assert "--num-threads" not in argv
    threadless = command("cpu", threads=0)
    assert threadless.environment({"A": "1"}) == {"A": "1"} | SAFE
    threaded = command("cpu", threads=3)
    assert threaded.environment({"A": "1"}) == {"A": "1", "OMP_NUM_THREADS": "3"} | SAFE


def test_sglang_labels_every_token_exactly_and_dies_without_delay() -> None:
    sglang = command("sglang", threads=0)
    argv = sglang.argv(model_dir=Path("m"), version=0, port=1, key_file=KEY)
    assert "--disable-overlap-schedule" in argv
    assert not {"--tp-size", "--dp-size"} & set(argv)
    dumps = {"SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "0", "SGLANG_PYSPY_DUMP_BEFORE_CRASH": "0"} | SAFE
    assert sglang.environment({}) == dumps
    wanted = {"SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "1"}
    assert sglang.environment(wanted) == dumps | wanted, "whoever wants dumps gets them"
    recording = command("sglang", records_experts=True)
    asked = recording.argv(model_dir=Path("m"), version=0, port=1, key_file=KEY)
    assert ("--enable-return-routed-experts" in asked, "--enable-return-routed-experts" in argv) == (
        True,
        False,
    )


@pytest.mark.parametrize(
    ("gpus", "tp_size", "options"),
    [
        ((5,), 1, {}),
        ((0, 1), 2, {"--tp-size": "2"}),
        ((2, 3), 1, {"--dp-size": "2"}),
        ((0, 1, 2, 3), 2, {"--tp-size": "2", "--dp-size": "2"}),
    ],
)
def test_sglang_spreads_copies_of_the_model_over_its_gpus(
    gpus: tuple[int, ...], tp_size: int, options: dict[str, str]
) -> None:
    sglang = command("sglang", gpus=gpus, tp_size=tp_size)
    argv = sglang.argv(model_dir=Path("m"), version=0, port=1, key_file=KEY)
    assert {
        name: argv[argv.index(name) + 1] for name in ("--tp-size", "--dp-size") if name in argv
    } == options
    assert sglang.environment({})["CUDA_VISIBLE_DEVICES"] == ",".join(map(str, gpus))


def test_engines_share_gpus_evenly_or_not_at_all() -> None:
    assert share_gpus(range(6), {"solver": 2, "verifier": 1}, tp_size=2) == {
        "solver": [(0, 1), (2, 3)],
        "verifier": [(4, 5)],
    }
    assert share_gpus([], {"solver": 2, "verifier": 1}, tp_size=2) == {"solver": [(), ()], "verifier": [()]}
    for gpus, tp_size in (([0, 1, 2], 1), ([0, 1], 2)):
        with pytest.raises(
            InvalidArgumentError, match=r"GPUs for 2 engines \(solver=1, verifier=1\).*multiple"
        ):
            share_gpus(gpus, {"solver": 1, "verifier": 1}, tp_size=tp_size)


def test_the_key_travels_in_a_file_that_each_engine_can_read() -> None:
    keys = {"cpu": ("--api-key-file", "k\n"), "sglang": ("--config", "api-key: k\n")}
    for kind, (option, content) in keys.items():
        argv = command(kind).argv(model_dir=Path("m"), version=0, port=1, key_file=KEY)
        assert argv[argv.index(option) + 1] == str(KEY)
        assert command(kind).key_file_content("k") == content


@pytest.mark.parametrize("own", [("--config", "mine.yaml"), ("--api-key=mine",)])
def test_an_own_key_of_sglang_is_left_alone(own: tuple[str, ...]) -> None:
    argv = command("sglang", extra=own).argv(model_dir=Path("m"), version=0, port=1, key_file=KEY)
    assert str(KEY) not in argv


def test_sglang_is_started_for_the_adapters_of_its_model() -> None:
    loras = (
        LoraSettings(of="base", rank=8, target_modules="attention"),
        LoraSettings(of="base", rank=32, target_modules="attention"),
    )
    argv = command("sglang", loras=loras).argv(model_dir=Path("/m"), version=0, port=1, key_file=KEY)
    start = argv.index("--enable-lora")
    assert argv[start : start + 6] == [
        "--enable-lora", "--max-lora-rank", "32", "--max-loras-per-batch", "5", "--lora-target-modules",
    ]  # fmt: skip
    assert argv[start + 6 : start + 10] == ["k_proj", "o_proj", "q_proj", "v_proj"]
    assert "--enable-lora" not in command("cpu", loras=loras).argv(
        model_dir=Path("/m"), version=0, port=1, key_file=KEY
    ), "the CPU engine takes adapters as it is"
