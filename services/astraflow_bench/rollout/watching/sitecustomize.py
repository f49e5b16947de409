"""Python imports this at start where its folder is on PYTHONPATH: the callbacks of event loops, by their CPU time.

Invariant: nothing happens in processes other than the module that `MODULE` names, and only callbacks of at least
`LEAST_S` are written to the file that `FILE` names, each as a line of JSON when it ends. Used by `rollout.callbacks`.
"""

import os
import sys
import time

FILE, MODULE = "BENCH_CALLBACKS_FILE", "BENCH_CALLBACKS_MODULE"
LEAST_S = 0.005
_MAX_NAME = 300


def watch(path: str) -> None:
    """From now on write the long callbacks of this process to a file."""
    import asyncio.events
    import json
    from pathlib import Path

    run = asyncio.events.Handle._run

    def timed(handle: asyncio.events.Handle) -> None:
        # Taken before, for a handle that was cancelled meanwhile forgets it.
        callback = handle._callback  # type: ignore[attr-defined]
        began_s = time.thread_time()
        run(handle)
        took_s = time.thread_time() - began_s
        if took_s >= LEAST_S:
            owner = getattr(callback, "__self__", None)
            what = owner.get_coro() if isinstance(owner, asyncio.Task) else callback
            with Path(path).open("a", encoding="utf-8") as file:
                file.write(json.dumps({"cpu_s": took_s, "callback": repr(what)[:_MAX_NAME]}) + "\n")

    asyncio.events.Handle._run = timed  # type: ignore[assignment, method-assign]


if os.environ.get(MODULE) in sys.orig_argv:
    watch(os.environ[FILE])
