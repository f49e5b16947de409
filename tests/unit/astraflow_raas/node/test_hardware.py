"""What a node says of its machine."""

import os
from pathlib import Path

import pytest

from astraflow.errors import InvalidArgumentError
from astraflow_raas.node.hardware import describe_hardware, require_gpus
from astraflow_raas.settings import NodeSettings


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for NVIDIA's tool that knows four GPUs of two kinds."""
    script = tmp_path / "nvidia-smi"
    script.write_text('#!/bin/sh\n[ "$3" = --id=0 ] || printf "B200\\nB200\\nB200\\n"\necho H100\n')
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    return script


def described(**options: str) -> str:
    return describe_hardware(NodeSettings(join="server:7070", **options))


@pytest.mark.usefixtures("tool")
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"engine": "sglang"}, "3 × B200, 1 × H100"),
        ({"engine": "sglang", "engine_gpus": "0"}, "1 × H100"),
        ({"engine": "sglang", "hardware": "a rented box"}, "a rented box"),
    ],
)
def test_a_node_names_the_gpus_that_its_engines_use_unless_it_is_told_otherwise(
    options: dict[str, str], expected: str
) -> None:
    assert described(**options) == expected


def test_a_machine_whose_gpus_nobody_can_name_is_its_processor(tool: Path) -> None:
    tool.write_text("#!/bin/sh\nexit 9\n")
    cores = f"{len(os.sched_getaffinity(0))} × "
    assert described(engine="sglang").startswith(cores)
    assert described().startswith(cores)


def test_a_gpu_that_the_machine_lacks_is_named_before_an_engine_is_started(tmp_path: Path) -> None:
    with pytest.raises(
        InvalidArgumentError, match=r"names GPU 0; this machine has none .* give the container"
    ):
        require_gpus([0], devices=tmp_path)
    for name in ("nvidia0", "nvidia1", "nvidiactl"):
        (tmp_path / name).touch()
    require_gpus([0, 1], devices=tmp_path)
    with pytest.raises(InvalidArgumentError, match="names GPU 2; this machine has 2 of NVIDIA's"):
        require_gpus([0, 2], devices=tmp_path)


@pytest.mark.parametrize("name", ["kfd", "dxg"])
def test_gpus_that_cannot_be_counted_are_left_to_the_engine(tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch()
    require_gpus([7], devices=tmp_path)
