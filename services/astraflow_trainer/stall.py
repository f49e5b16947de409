"""A training thread that stands still while its process answers: noticed by what it gets done, said, and ended.

Invariant: only computing counts, in which the thread waits for nobody but other ranks: a server, a store or an operator
may keep it waiting for as long as they like. `server` runs the watch beside the training thread, on every rank; the
heartbeat tells the server.
"""

import asyncio
import sys
import traceback
from pathlib import Path

from astraflow.errors import UnavailableError
from astraflow_kit.awake import LOOK_S, Silence
from astraflow_kit.clock import Clock, SystemClock
from astraflow_kit.log import get_logger
from astraflow_trainer.progress import Progress

log = get_logger(__name__)

_SHOWN_SHARE = 0.5


async def stalled(
    progress: Progress, *, after_s: float, clock: Clock | None = None, look_s: float = LOOK_S
) -> UnavailableError:
    """Return, once the training thread has stood still for `after_s`, the error to end with; 0 waits for ever.

    From half of that time on, `progress` says what it stands still in.
    """
    silence = Silence(clock=clock or SystemClock())
    while True:
        thread = progress.computing_thread
        # Not computing is no silence: every look then counts as news.
        still_s = silence.look((thread, progress.num_moves) if thread is not None else object())
        if thread is None or not 0 < _SHOWN_SHARE * after_s <= still_s:
            progress.hangs("")
        else:
            _note(progress, thread, still_s=still_s, after_s=after_s)
            if still_s >= after_s:
                return UnavailableError(
                    f"the training thread stands still: {progress.state.hung}; the trainer starts again from its "
                    "newest checkpoint. If a micro-batch may take that long, raise ASTRAFLOW_TRAINING_STALL_S"
                )
        await asyncio.sleep(look_s)


def _note(progress: Progress, thread: int, *, still_s: float, after_s: float) -> None:
    stack = traceback.extract_stack(sys._current_frames().get(thread))
    if not progress.state.hung:
        log.error(
            "training.hung",
            still_s=round(still_s, 1),
            ended_after_s=after_s,
            stack="".join(stack.format()),
        )
    last = stack[-1]
    progress.hangs(
        f"no micro-batch was begun or ended for {still_s:.0f} s, the bound is {after_s:g}; it is in {last.name} "
        f"({Path(last.filename).name}:{last.lineno})"
    )
