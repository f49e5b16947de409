"""Wall clocks of the processes of a run, each to be put forward or back while it runs.

Linux has one wall clock for all, so it is done inside each process, by a preloaded library. Monotonic clocks, and so
what a process waits for in the kernel, are the machine's own.
"""

import os
import struct
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_SOURCE = Path(__file__).with_name("wall_clock.c")
EVERYBODY = ("launcher", "dataflow", "valkey", "trainer", "node", "engine")


class Clocks:
    """What the processes started with `variables` read; `folder` takes a file for each role, and the library."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir()
        for role in EVERYBODY:
            self._set(role, 0.0)
        library = folder / "wall_clock.so"
        subprocess.run(["cc", "-shared", "-fPIC", "-O2", "-o", str(library), str(_SOURCE)], check=True)
        self.variables = {"WALL_CLOCKS": str(folder), "LD_PRELOAD": str(library)}

    @contextmanager
    def ahead(self, seconds: float, roles: tuple[str, ...] = EVERYBODY) -> Iterator[None]:
        """For as long as the block the clocks of these roles are ahead by so much; behind when it is negative."""
        for role in roles:
            self._set(role, seconds)
        try:
            yield
        finally:
            for role in roles:
                self._set(role, 0.0)

    def _set(self, role: str, seconds: float) -> None:
        # In place: the processes have it mapped.
        handle = os.open(self._folder / role, os.O_WRONLY | os.O_CREAT, 0o644)
        os.pwrite(handle, struct.pack("d", seconds), 0)
        os.close(handle)
