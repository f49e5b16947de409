"""What a mirror takes beside its weights file, measured in a process of its own.

`python -m support.mirror_memory FOLDER TARGET THREADS` advances the mirror in FOLDER and prints the peak growth of the
process's private memory in bytes; the mirror and its journal are mapped files, which are not private.
"""

import sys
import threading
from functools import partial
from pathlib import Path

from astraflow_weights.mirror.mirror import Mirror
from astraflow_weights.settings import MirrorSettings
from astraflow_weights.store.file import FileStore
from support.codec_memory import status_bytes
from support.published_models import read_log

private_bytes = partial(status_bytes, "RssAnon")
"""Private memory now."""


def main() -> None:
    """Advance while another thread looks."""
    folder, target, threads = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    store = FileStore(folder / "store")
    log = read_log(store)
    settings = MirrorSettings(fetch_threads=threads, apply_threads=threads)
    mirror = Mirror(folder / "mirror", settings=settings)
    before, peak, ended = private_bytes(), [0], threading.Event()

    def look() -> None:
        while not ended.wait(0.001):
            peak[0] = max(peak[0], private_bytes())

    looking = threading.Thread(target=look)
    looking.start()
    mirror.advance(store, log, target=target)
    ended.set()
    looking.join()
    sys.stdout.write(f"{peak[0] - before}\n")


if __name__ == "__main__":
    main()
