"""A node whose answers take longer than those of others: `python -m …pools.timed_node SPEED [OPTIONS]`.

It is `astraflow raas OPTIONS`, for runs with a timed workflow. Started by `regions`.
"""

from __future__ import annotations

import sys

from astraflow_bench.studies.pools.timed_turn import set_speed
from astraflow_raas.__main__ import app


def main() -> None:
    """Set the speed, then be a node."""
    set_speed(float(sys.argv.pop(1)))
    app()


if __name__ == "__main__":
    main()
