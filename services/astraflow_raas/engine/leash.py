"""Becomes another program that dies when its parent does, even by SIGKILL: `-m astraflow_raas.engine.leash
PID CMD…`.

Invariant: the program keeps this process's pid and process group, so whoever started it can end the group.
Started by `process`; imports nothing heavy because it runs before every engine.
"""

import os
import sys

from astraflow_kit.parent import die_with_parent


def main(arguments: list[str]) -> None:
    """Arm the parent's death and exec; does not return. Raises OSError when the program cannot be started."""
    die_with_parent(int(arguments[0]))
    os.execvp(arguments[1], arguments[1:])


if __name__ == "__main__":
    main(sys.argv[1:])
