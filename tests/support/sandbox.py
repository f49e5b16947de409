"""Where tests of the sandbox can run: CI installs bubblewrap, elsewhere they are skipped and say so."""

import ctypes
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

needs_bubblewrap = pytest.mark.skipif(
    shutil.which("bwrap") is None and os.environ.get("CI") != "true",
    reason="needs bubblewrap (apt install bubblewrap); .ci/run installs it",
)
_VERSION = 0x20080522
_OVERRIDES = 0b1110  # DAC_OVERRIDE, DAC_READ_SEARCH, FOWNER


@contextmanager
def without_override_of_permissions() -> Iterator[None]:
    """Modes of files bind this thread, and those that it starts, also where root runs the tests."""
    libc = ctypes.CDLL(None, use_errno=True)
    header, kept = (ctypes.c_uint32 * 2)(_VERSION, 0), (ctypes.c_uint32 * 6)()
    assert libc.capget(header, kept) == 0, os.strerror(ctypes.get_errno())
    assert libc.capset(header, (ctypes.c_uint32 * 6)(kept[0] & ~_OVERRIDES, *kept[1:])) == 0
    try:
        yield
    finally:
        assert libc.capset(header, kept) == 0
