"""`python -m astraflow_engine` and `astraflow engine`."""

from collections.abc import Mapping

from astraflow_engine.settings import EngineSettings
from astraflow_kit.daemon_command import daemon_command

_ABOUT = """Serve a checkpoint on CPU behind the part of SGLang's HTTP API that rollout nodes use.

Paths: /generate, /pause_generation, /continue_generation, /update_weights_from_disk, /flush_cache,
/abort_request, /health, /health_generate, /model_info, /server_info, /v1/loads, /metrics.

Example: `astraflow engine --model-path out/warm --port 30000 --context-length 256`
"""


# `--help` and wrong settings must not wait for torch, so each imports the engine itself.
def _run(settings: EngineSettings) -> int:
    from astraflow_engine import assembly

    return assembly.run(settings)


def _check(settings: EngineSettings) -> Mapping[str, object]:
    """Validate settings, read the whole checkpoint, then exit."""
    from astraflow_engine import assembly

    return assembly.check(settings)


app = daemon_command(EngineSettings, name="engine", about=_ABOUT, run=_run, check=_check)

if __name__ == "__main__":
    app()
