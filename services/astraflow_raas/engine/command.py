"""The command line that starts an engine, by kind.

Invariant: an engine listens on loopback only, under a weight version that is a number, so every token it
samples is attributable. `process` runs the command; `server` asks `require_engine` before it joins.
"""

import asyncio
import importlib.util
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from astraflow.errors import InvalidArgumentError
from astraflow_kit.ports import LOOPBACK
from astraflow_raas.settings import EMBEDDED_ENGINE, SGLANG_ENGINE

_NEEDS = {EMBEDDED_ENGINE: ("astraflow_engine", "torch"), SGLANG_ENGINE: ("sglang",)}
_REMEDIES = {
    EMBEDDED_ENGINE: "pip install 'astraflow[engine]'",
    SGLANG_ENGINE: "in an environment of its own, not in this one",
}


@dataclass(frozen=True, kw_only=True)
class EngineCommand:
    """How to start the engine of one policy. `kind` is `astraflow_engine` or `sglang`."""

    kind: str
    python: Path
    extra_args: tuple[str, ...]
    max_running_requests: int
    num_threads: int
    seed: int

    def argv(self, *, model_dir: Path, version: int, port: int) -> list[str]:
        """The whole command for one start."""
        common = ["--model-path", str(model_dir), "--host", LOOPBACK, "--port", str(port)]
        common += ["--weight-version", str(version)]
        own = self._embedded_args() if self.kind == EMBEDDED_ENGINE else self._sglang_args()
        return [str(self.python), "-m", *own[:1], *common, *own[1:], *self.extra_args]

    def environment(self, inherited: Mapping[str, str]) -> dict[str, str]:
        """The engine's environment: the node's, with the thread count that a CPU engine should use."""
        threads = {"OMP_NUM_THREADS": str(self.num_threads)} if self.num_threads else {}
        return {**inherited, **threads}

    def _embedded_args(self) -> list[str]:
        args = ["astraflow_engine", "--seed", str(self.seed)]
        args += ["--max-running-requests", str(self.max_running_requests)]
        return [*args, *(["--num-threads", str(self.num_threads)] if self.num_threads else [])]

    def _sglang_args(self) -> list[str]:
        # The node decodes text itself and probes health itself.
        return ["sglang.launch_server", "--skip-tokenizer-init", "--skip-server-warmup"]


async def require_engine(kind: str, *, python: Path | None) -> None:
    """Refuse a kind of engine that its interpreter cannot start. Raises InvalidArgumentError with the remedy."""
    if "://" in kind:
        return
    missing = [name for name in _NEEDS[kind] if not await _has_module(name, python=python)]
    if missing:
        interpreter = python or Path(sys.executable)
        raise InvalidArgumentError(
            f"the engine {kind!r} cannot run here: {interpreter} has no module {', '.join(missing)}; install it "
            f"there ({_REMEDIES[kind]}), name another interpreter with --engine-python, or choose another --engine"
        )


async def _has_module(name: str, *, python: Path | None) -> bool:
    if python is None:
        return importlib.util.find_spec(name) is not None
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({name!r}) is None)"
    try:
        process = await asyncio.create_subprocess_exec(
            str(python), "-c", code, stdin=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL
        )
    except OSError as error:
        raise InvalidArgumentError(f"--engine-python {python} cannot be started: {error}") from error
    return await process.wait() == 0
