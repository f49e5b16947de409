"""The command line that starts an engine, by kind.

Invariant: an engine listens on loopback only, answers only who has its key, which no command line shows, serves under
a weight version that is a number, and SGLang does not overlap scheduling with sampling, so every token it samples is
attributable. `process` runs the command; `server` asks `require_engine` before it joins.
"""

import asyncio
import importlib.util
import itertools
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from astraflow.errors import InvalidArgumentError
from astraflow.recipe import LoraSettings
from astraflow_kit.ports import LOOPBACK
from astraflow_raas.engine.changed_elements import LOADER, ChangedOrders
from astraflow_raas.settings import EMBEDDED_ENGINE, SGLANG_ENGINE

_NEEDS = {EMBEDDED_ENGINE: ("astraflow_engine", "torch"), SGLANG_ENGINE: ("sglang",)}
# A crashing SGLang otherwise stays for a minute, in case somebody wants dumps of its GPUs and its schedulers.
_SGLANG_ENVIRONMENT = {"SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "0", "SGLANG_PYSPY_DUMP_BEFORE_CRASH": "0"}
# An engine may be of a Python that has no -P; from 3.11 on this says the same: no modules of the current folder.
_SAFE_PATH = {"PYTHONSAFEPATH": "1"}
_REMEDIES = {
    EMBEDDED_ENGINE: "pip install 'astraflow[engine]'",
    SGLANG_ENGINE: "in an environment of its own: python -m venv /opt/sglang && /opt/sglang/bin/pip install sglang",
}


@dataclass(frozen=True, kw_only=True)
class EngineCommand:
    """How to start one engine of a policy. `kind` is `cpu` or `sglang`."""

    kind: str
    python: Path
    extra_args: tuple[str, ...]
    max_running_requests: int
    num_threads: int
    seed: int
    gpus: tuple[int, ...] = ()
    """GPUs of SGLang, by their numbers here; empty leaves the choice to it."""
    tp_size: int = 1
    """GPUs that one copy of the model is spread over; what remains of `gpus` makes data-parallel copies."""
    loras: tuple[LoraSettings, ...] = ()
    """Adapters of the model that are to be served with it."""
    recomputes: bool = False
    """Keys and values of running calls are computed anew at each change of weights."""
    records_experts: bool = False
    """SGLang says which experts tokens went to, where it is asked."""
    orders: ChangedOrders | None = None
    """Of SGLang, when it is to load changed elements only."""

    def argv(self, *, model_dir: Path, version: int, port: int, key_file: Path) -> list[str]:
        """The whole command for one start; `key_file` holds what `key_file_content` returned."""
        common = ["--model-path", str(model_dir), "--host", LOOPBACK, "--port", str(port)]
        common += ["--weight-version", str(version)]
        if self.kind == EMBEDDED_ENGINE:
            common += ["--api-key-file", str(key_file)]
        elif not self._has_own_key:
            common += ["--config", str(key_file)]
        own = self._embedded_args() if self.kind == EMBEDDED_ENGINE else self._sglang_args()
        return [str(self.python), "-m", *own[:1], *common, *own[1:], *self.extra_args]

    def key_file_content(self, key: str) -> str:
        """How the engine reads its key: SGLang, which takes it from no file of its own, as one of its options."""
        return f"api-key: {key}\n" if self.kind == SGLANG_ENGINE else f"{key}\n"

    @property
    def _has_own_key(self) -> bool:
        """Options that whoever runs the node gave: SGLang reads one file of options, and they may name a key."""
        return any(option.partition("=")[0] in ("--config", "--api-key") for option in self.extra_args)

    def environment(self, inherited: Mapping[str, str]) -> dict[str, str]:
        """The engine's environment: the node's, with the threads and the GPUs that it may use."""
        threads = {"OMP_NUM_THREADS": str(self.num_threads)} if self.num_threads else {}
        gpus = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, self.gpus))} if self.gpus else {}
        defaults = _SGLANG_ENVIRONMENT if self.kind == SGLANG_ENGINE else {}
        loader = self.orders.environment(inherited) if self.orders else {}
        return {**defaults, **inherited, **threads, **gpus, **loader, **_SAFE_PATH}

    def _embedded_args(self) -> list[str]:
        args = ["astraflow_engine", "--seed", str(self.seed)]
        # One more than the node fills: its own probes need a place too.
        args += ["--max-running-requests", str(self.max_running_requests + 1)]
        return [*args, *(["--num-threads", str(self.num_threads)] if self.num_threads else [])]

    def _sglang_args(self) -> list[str]:
        # The node decodes text itself and probes health itself. Overlapped, the token that is in flight while weights
        # are swapped would be labelled with the next version (23 of 24 swaps; none without).
        args = [
            "sglang.launch_server",
            "--skip-tokenizer-init",
            "--skip-server-warmup",
            "--disable-overlap-schedule",
        ]
        args += ["--tp-size", str(self.tp_size)] if self.tp_size > 1 else []
        # SGLang flushes no prefixes while retracted calls wait, so these would find those of older weights.
        args += ["--disable-radix-cache"] if self.recomputes else []
        args += ["--custom-weight-loader", LOADER] if self.orders else []
        args += ["--enable-return-routed-experts"] if self.records_experts else []
        args += lora_args(self.loras) if self.loras else []
        copies = len(self.gpus) // self.tp_size
        return [*args, *(["--dp-size", str(copies)] if copies > 1 else [])]


def lora_args(loras: Sequence[LoraSettings]) -> list[str]:
    """Options with which SGLang can load adapters like these while it serves."""
    modules = {module for lora in loras for module in lora.modules}
    return [
        "--enable-lora",
        *("--max-lora-rank", str(max(lora.rank for lora in loras))),
        # Calls end under the version that they began under, and probes ask the model itself.
        *("--max-loras-per-batch", str(2 * len(loras) + 1)),
        *("--lora-target-modules", *sorted(modules)),
    ]


def share_gpus(
    gpus: Sequence[int], engines: Mapping[str, int], *, tp_size: int
) -> dict[str, list[tuple[int, ...]]]:
    """The GPUs of each engine, by policy: equal shares in order. `engines` says how many each policy has.

    Raises InvalidArgumentError when they do not come out even.
    """
    number = sum(engines.values())
    share, rest = divmod(len(gpus), max(1, number))
    if gpus and (rest or share % tp_size):
        wanted = ", ".join(f"{name}={each}" for name, each in engines.items())
        raise InvalidArgumentError(
            f"--engine-gpus names {len(gpus)} GPUs for {number} engines ({wanted}) and --engine-tp-size is {tp_size}; "
            f"give every engine the same number, a multiple of {tp_size}"
        )
    shares = (tuple(gpus[index * share : (index + 1) * share]) for index in itertools.count())
    return {name: list(itertools.islice(shares, number)) for name, number in engines.items()}


async def require_engine(kind: str, *, python: Path | None) -> None:
    """Refuse a kind of engine that its interpreter cannot start. Raises InvalidArgumentError with the remedy."""
    if "://" in kind:
        return
    missing = [name for name in _NEEDS[kind] if not await _has_module(name, python=python)]
    if missing:
        interpreter = python or Path(sys.executable)
        raise InvalidArgumentError(
            f"the engine {kind!r} cannot run here: {interpreter} has no module {', '.join(missing)}; install it "
            f"({_REMEDIES[kind]}), name the interpreter that has it with --engine-python, or choose another --engine"
        )


async def _has_module(name: str, *, python: Path | None) -> bool:
    if python is None:
        return importlib.util.find_spec(name) is not None
    safe = "import sys; sys.path = [*filter(None, sys.path)]"
    code = f"{safe}; import importlib.util as found; sys.exit(not found.find_spec({name!r}))"
    try:
        process = await asyncio.create_subprocess_exec(
            str(python), "-c", code, stdin=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL
        )
    except OSError as error:
        raise InvalidArgumentError(f"--engine-python {python} cannot be started: {error}") from error
    return await process.wait() == 0
