"""`python -m astraflow_raas` and `astraflow raas`."""

import asyncio
from collections.abc import Mapping

from astraflow_kit.daemon_command import daemon_command
from astraflow_raas.settings import NodeSettings

_ABOUT = """Start a RaaS node: lease tasks, run the recipe's workflow against an engine, push what was sampled.

The node only dials out. It gets the recipe from the dataflow server and the weights from the run's store,
starts its engine with the first announced version, refreshes weights while it samples, and outlives
restarts of server and engine. It ends with status 0 when the run is finished, or on SIGTERM once it has
finished and pushed what it holds; a second signal stops it at once. Status 2: settings or recipe must
change. 3: another process uses its name. 75: the server was not reachable.

Example: `astraflow raas --join 10.0.0.5:7070 --engine sglang --engine-python /opt/sglang/bin/python`
"""


# `--help` and wrong settings must not wait for grpc and the tokenizer library, so each imports the server itself.
def _run(settings: NodeSettings) -> int:
    from astraflow_raas import server

    return server.run(settings)


def _check(settings: NodeSettings) -> Mapping[str, str]:
    """Validate settings, server, recipe, plug-ins and store, then exit."""
    from astraflow_raas import server

    return asyncio.run(server.check(settings))


app = daemon_command(NodeSettings, name="raas", about=_ABOUT, run=_run, check=_check)

if __name__ == "__main__":
    app()
