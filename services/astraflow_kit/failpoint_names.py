"""Every failpoint of the system, each with the moment it stands for.

One table, so that `astraflow doctor` and the chaos tests can list all failpoints without importing a
daemon, and a mistyped name is refused in any process. Add a line here together with its
`failpoints.hit("<name>")`; a test compares both sides. Names are `<daemon>.<moment>`.
"""

from collections.abc import Mapping
from types import MappingProxyType

KNOWN: Mapping[str, str] = MappingProxyType(
    {
        # dataflow
        # raas
        # trainer
        # weights
        # engine
    }
)
