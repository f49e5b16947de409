"""`python -m astraflow_launcher.run.exec_with_parent PARENT_PID PROGRAM ARGUMENTS…`: become PROGRAM, and die with
the parent.

The launcher starts every child through this module, so that a program which knows nothing of us (the embedded
Redis) is ended by the kernel when the launcher is, whatever ends it.
"""

from __future__ import annotations

import os
import sys

from astraflow_kit.parent import die_with_parent


def main() -> None:
    """Arm the parent-death signal and replace this process. Never returns."""
    parent_pid, program, *arguments = sys.argv[1:]
    die_with_parent(int(parent_pid))
    os.execvp(program, [program, *arguments])


if __name__ == "__main__":
    main()
