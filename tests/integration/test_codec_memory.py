"""The codecs take no more memory than promised beside the model and their output, however large the model is."""

import pytest

from astraflow_weights.codec import kernel
from support.measured import measured

MIB = 2**20
BOUND = (64 + 16) * MIB
"""64 MiB, and 16 MiB for the one thread."""
NUM_ELEMENTS = 3 * 2**24
"""Of 2 bytes: models of 96 MiB, so that whatever held one would be seen."""


@pytest.mark.ci
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("path", "density"), [("kernel", 0.05), ("numpy", 0.05), ("kernel", 1.0)])
def test_scratch_of_every_operation_stays_below_its_bound(path: str, density: float) -> None:
    if path == "kernel" and kernel.active() is None:
        pytest.skip(kernel.describe())
    scratch = measured("support.codec_memory", path, str(density), str(NUM_ELEMENTS))
    assert len(scratch) == 8
    assert {name: size // MIB for name, size in scratch.items() if size > BOUND} == {}
