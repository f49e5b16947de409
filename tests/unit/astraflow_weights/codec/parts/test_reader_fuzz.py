"""Hostile parts by the thousand never do more than raise CorruptPart: not in numpy, not in the kernel, not in memory.

The process that decodes them runs under a limit of memory; another one with a kernel built with sanitizers, which
ends at the first access out of bounds.
"""

import shutil
from pathlib import Path

import pytest

from support import part_fuzz


@pytest.fixture(scope="module")
def sanitized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The kernel, built with the address and the undefined-behaviour sanitizer."""
    if shutil.which("cc") is None or not part_fuzz.sanitizer_library():
        pytest.skip("no C compiler, or one without libasan")
    library = tmp_path_factory.mktemp("kernel") / "libkernel.so"
    part_fuzz.build_with_sanitizers(library)
    return library


def check(found: dict[str, int], *, count: int) -> None:
    """All were decoded, and enough of them got as far as the bodies of tiles."""
    assert found["refused"] + found["refused inside"] + found["accepted"] == count
    assert found["refused inside"] > count // 5
    assert found["refused"] > count // 5
    assert found["round_trips"] > 0


@pytest.mark.slow
def test_hostile_parts_are_refused_on_every_path_within_bounds_of_memory() -> None:
    check(part_fuzz.run(count=2_000, seed=1), count=2_000)


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_a_hundred_thousand_hostile_parts() -> None:
    check(part_fuzz.run(count=100_000, seed=2, timeout_s=7000), count=100_000)


@pytest.mark.ci
def test_the_kernel_stays_inside_its_arrays_on_hostile_parts(sanitized: Path) -> None:
    check(part_fuzz.run(count=2_000, seed=3, library=sanitized), count=2_000)


@pytest.mark.ci
def test_the_sanitizer_sees_a_read_beyond_an_array(sanitized: Path) -> None:
    """Else the test above could not fail."""
    with pytest.raises(AssertionError, match="heap-buffer-overflow"):
        part_fuzz.run(count=1, seed=3, library=sanitized, more=["--read-beyond"])


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_the_kernel_stays_inside_its_arrays_on_very_many_hostile_parts(sanitized: Path) -> None:
    check(part_fuzz.run(count=20_000, seed=4, library=sanitized, timeout_s=7000), count=20_000)
