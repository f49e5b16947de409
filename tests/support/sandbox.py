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
CHANGES_THE_HOST = """
import os, stat
def tries(path, found):
    yield lambda: os.chmod(path, stat.S_IMODE(found.st_mode))
    yield lambda: os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))
    if not stat.S_ISCHR(found.st_mode) and os.access(path, os.W_OK):
        yield lambda: None
for place, _, files in (each for top in ("/proc", "/sys", "/dev") for each in os.walk(top)):
    for path in (place, *(os.path.join(place, name) for name in files)):
        if path.startswith(("/dev/pts", "/dev/shm")) or os.path.islink(path) or not os.path.exists(path):
            continue
        for change in tries(path, os.lstat(path)):
            try:
                change()
                print(path)
            except OSError:
                pass
with open("/dev/null", "w") as null, open("/dev/zero", "rb", 0) as zero, open("/dev/urandom", "rb", 0) as random:
    print(null.write("x") + len(zero.read(3)) + len(random.read(3)))
"""
"""Prints what it may write, or whose mode and times it may set (to what they are), of what is not the sandbox's alone;
then 7, when devices work."""
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
