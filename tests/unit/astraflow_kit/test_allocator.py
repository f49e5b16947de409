"""Threads that allocate at once share two arenas."""

import subprocess
import sys

import pytest

PROGRAM = """
import ctypes, pathlib, sys, threading
from astraflow_kit.allocator import share_arenas

libc = ctypes.CDLL(None)
libc.fopen.restype = ctypes.c_void_p
if sys.argv[2] == "shared":
    assert share_arenas()
together = threading.Barrier(12)

def allocate():
    together.wait()
    held = [libc.malloc(2000) for _ in range(1000)]
    together.wait()

threads = [threading.Thread(target=allocate) for _ in range(12)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
file = ctypes.c_void_p(libc.fopen(sys.argv[1].encode(), b"w"))
libc.malloc_info(0, file)
libc.fclose(file)
print(pathlib.Path(sys.argv[1]).read_text().count("<heap nr="))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="mallopt is glibc's")
@pytest.mark.parametrize(("mode", "fewest", "most"), [("shared", 1, 2), ("own", 3, 10**6)])
def test_threads_that_allocate_at_once_share_arenas(
    tmp_path: object, mode: str, fewest: int, most: int
) -> None:
    command = [sys.executable, "-c", PROGRAM, f"{tmp_path}/arenas.xml", mode]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=100)
    assert fewest <= int(done.stdout) <= most
