"""`python -m astraflow_environment` and `astraflow environment`."""

from collections.abc import Mapping

from astraflow_environment.settings import EnvironmentSettings
from astraflow_kit.daemon_command import daemon_command

_ABOUT = """Serve an environment to RaaS nodes: what episodes of several turns act in.

The environment is any `Environment` plug-in. It runs in worker processes that are loaded ahead; one that hangs
or dies is replaced, and only its own sessions end. Nodes get the address with
`--environment NAME=HOST:PORT`, and recipes name it `served:NAME`.

Example: `astraflow environment --use recipe:HigherOrLower --recipe my-recipe --workers 2 --port 7100`
"""


# `--help` and wrong settings must not wait for grpc, so each imports the server itself.
def _run(settings: EnvironmentSettings) -> int:
    from astraflow_environment import server

    return server.run(settings)


def _check(settings: EnvironmentSettings) -> Mapping[str, object]:
    """Load the environment, then exit."""
    from astraflow_environment import server

    return server.check(settings)


app = daemon_command(EnvironmentSettings, name="environment", about=_ABOUT, run=_run, check=_check)

if __name__ == "__main__":
    app()
