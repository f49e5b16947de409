"""Compiles the weight codecs' `kernel.c` into the shared library beside it, when the package is built or installed.

Invariant: an installation never fails for want of a compiler: the library is then absent, and numpy does its
work with the same results. Hatchling calls `KernelBuildHook` (pyproject.toml); it is not part of the wheel.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SOURCE = Path(__file__).parent / "astraflow_weights" / "codec" / "kernel.c"
LIBRARY = SOURCE.with_name("libkernel.so")


class KernelBuildHook(BuildHookInterface[Any]):
    """Adds the library to wheels, and leaves it in the tree for editable installations."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile before the files of the wheel are collected, and take in the dashboard's page where it was built."""
        del version
        build_data["artifacts"].append("/services/astraflow_dataflow/dashboard/static/*")
        if not compile_kernel(LIBRARY):
            return
        build_data["pure_python"] = False
        build_data["infer_tag"] = True
        build_data["artifacts"].append(f"/services/astraflow_weights/codec/{LIBRARY.name}")


def compile_kernel(library: Path) -> bool:
    """Whether `library` was made. A compiler that is missing or fails is reported and does no harm."""
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        sys.stderr.write("astraflow: no C compiler; weight deltas will be coded by numpy\n")
        return False
    # Made under another name and moved: a process that has the old library mapped keeps it.
    partial = library.with_suffix(".partial")
    command = [compiler, "-O3", "-std=gnu11", "-shared", "-fPIC", "-o", str(partial), str(SOURCE)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.stderr.write(f"astraflow: {' '.join(command)} failed; numpy will do its work\n{done.stderr}\n")
        return False
    partial.replace(library)
    return True
