"""The compiled kernel: built from its source, refused when it is not ours, and never needed."""

import shutil
from pathlib import Path

import numpy as np
import pytest

import kernel_build_hook
from astraflow_weights.codec import encode_delta, kernel
from astraflow_weights.codec.kernel import Isa
from support.weight_models import gaussian_bf16

needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")


@needs_compiler
def test_the_installed_library_is_made_from_this_source(tmp_path: Path) -> None:
    """A stale library would be tested in place of the source."""
    fresh = tmp_path / "libkernel.so"
    assert kernel_build_hook.compile_kernel(fresh)
    assert kernel.LIBRARY.exists(), "run `make setup` again"
    assert kernel.LIBRARY.read_bytes() == fresh.read_bytes(), "kernel.c changed: run `make setup` again"


def test_without_a_compiler_the_installation_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    assert not kernel_build_hook.compile_kernel(tmp_path / "libkernel.so")
    assert "coded by numpy" in capsys.readouterr().err


def test_a_missing_library_is_no_kernel_and_says_why(tmp_path: Path) -> None:
    loaded = kernel.load(tmp_path / "libkernel.so")
    assert loaded.kernel is None
    assert "no C compiler when the package was installed" in loaded.reason


def test_a_library_of_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "libkernel.so"
    path.write_bytes(b"not a library")
    assert "does not load" in kernel.load(path).reason


def test_what_is_used_can_be_lowered_and_comes_back() -> None:
    before = kernel.describe()
    with kernel.using(Isa.SCALAR):
        assert kernel.active() is None or kernel.describe() == "compiled kernel (SCALAR)"
    with kernel.using(None):
        assert kernel.active() is None
        assert kernel.describe().startswith("numpy")
    assert kernel.describe() == before


@pytest.mark.parametrize("context", [False, True])
def test_every_path_writes_the_same_bytes(context: bool) -> None:
    random = np.random.default_rng(0)
    base = {"w": gaussian_bf16(random, (70_001,))}
    target = {"w": base["w"] + (random.random(70_001) < 0.02).astype(np.uint16)}
    written = []
    for path in (None, *Isa):
        with kernel.using(path):
            written.append(encode_delta(base, target, context=context))
    assert all(parts == written[0] for parts in written)
