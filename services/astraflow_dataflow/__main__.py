"""`python -m astraflow_dataflow` and `astraflow dataflow`."""

import asyncio
from collections.abc import Mapping

from astraflow_dataflow.settings import DataflowServerSettings
from astraflow_kit.daemon_command import daemon_command

_ABOUT = """Start a dataflow server: tasks are leased to nodes, episodes come back, batches go to trainers.

All state is in Redis: the server may be killed at any time, and several may serve the same data. It ends
with status 0 on SIGTERM; a second signal stops it at once. Status 2: settings must change. 3: the data in
Redis belongs to another release, or Redis is not safe to use. 75: Redis was not reachable.

Example: `astraflow dataflow --redis redis://127.0.0.1:6379 --port 7070 --http-port 7071`
"""


# `--help` and wrong settings must not wait for grpc and numpy, so each imports the server itself.
def _run(settings: DataflowServerSettings) -> int:
    if settings.processes > 1:
        from astraflow_dataflow import processes

        return processes.run(settings)
    from astraflow_dataflow import server

    return server.run(settings)


def _check(settings: DataflowServerSettings) -> Mapping[str, str]:
    """Validate settings and Redis, then exit."""
    from astraflow_dataflow import server

    return asyncio.run(server.check(settings))


app = daemon_command(DataflowServerSettings, name="dataflow", about=_ABOUT, run=_run, check=_check)

if __name__ == "__main__":
    app()
