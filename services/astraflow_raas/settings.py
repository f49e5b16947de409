"""Settings of a node: whom to join, what to run the engine with, where to keep weights.

Invariant: nothing about the run is set here; that comes from the recipe the server hands out when the node
joins. `__main__` builds them from options and `ASTRAFLOW_*` variables, `server` passes the parts on.
"""

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator

from astraflow.connecting.connection import Connection, DialFiles, dial
from astraflow.errors import InvalidArgumentError
from astraflow_kit.join_settings import JoinSettings
from astraflow_kit.making import MakingSettings
from astraflow_kit.nearest import did_you_mean
from astraflow_kit.settings import ENV_PREFIX, CommandOption
from astraflow_weights.daemon_settings import StoreAccess

_ADDRESS = r"^(\[[0-9A-Fa-f:]+\]|[^\s:/]+):[0-9]{1,5}$"
_SHARES = r"^$|^[^=,]+=[0-9]+(,[^=,]+=[0-9]+)*$"
_MAX_ENGINES = 64
EMBEDDED_ENGINE = "cpu"
SGLANG_ENGINE = "sglang"


class NodeSettings(JoinSettings, StoreAccess, MakingSettings):
    """The options of a node. Only `join` or `join_file` is required."""

    run_id: Annotated[str, CommandOption("The run")] = ""
    """Run to join; empty means the only run."""
    node_id: Annotated[str, Field(pattern=r"^$|^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")] = ""
    """Stable name of the node; empty takes the host's name with a number that is free in the work folder, behind what
    the token grants."""
    name_patience_s: Annotated[float, Field(ge=0.1, le=86_400)] = 20.0
    """Seconds to wait until another node of the same name has gone: one that says nothing counts as there for 15 s. A
    node that restarts waits for nobody, as its work folder has its last session."""
    region: str = ""
    """Region the node is in."""
    pool: str = ""
    """Pool the node belongs to."""
    hardware: Annotated[str, Field(max_length=256)] = ""
    """What the machine is, for people; empty lets the node look."""
    price_per_hour: Annotated[float, Field(ge=0, le=1e6)] | None = None
    """What an hour of the machine costs, in one currency for all nodes; shown with the tokens it samples."""
    server_silence_s: Annotated[float, Field(ge=0.3, le=3600)] = 10.0
    """Seconds without a message of the dataflow server after which the node opens another session; servers say
    something every 3 s."""

    engine: Annotated[str, CommandOption("The engine", metavar="KIND|URL")] = EMBEDDED_ENGINE
    """`cpu`, which comes with AstraFlow, `sglang`, or the http:// address of an engine that already runs (single-policy
    runs)."""
    serve: Annotated[str, Field(pattern=_SHARES), CommandOption(metavar="POLICY=N,…")] = ""
    """Engines of each policy on this node, as in solver=2,verifier=1; a policy that is not named has one."""
    engine_python: Path | None = None
    """Interpreter that starts the engine; SGLang lives in an environment of its own. Unset: this one."""
    engine_args: Annotated[tuple[str, ...], CommandOption(names=("--engine-arg",))] = ()
    """One more argument for the engine's command line; repeat it."""
    engine_threads: Annotated[int, Field(ge=0, le=4096)] = 1
    """OMP threads of a CPU engine; 0 leaves it to the engine."""
    engine_gpus: Annotated[str, Field(pattern=r"^$|^[0-9]+(,[0-9]+)*$"), CommandOption(metavar="0,1,…")] = ""
    """GPUs for SGLang, in equal shares for the node's engines; empty leaves the choice to SGLang."""
    engine_tp_size: Annotated[int, Field(ge=1, le=1024)] = 1
    """GPUs that SGLang spreads one copy of a model over; a share that holds several copies is data parallel."""
    engine_start_timeout_s: Annotated[float, Field(gt=0, le=7200)] = 300.0
    """Seconds a started engine may take until it is healthy."""
    engine_request_timeout_s: Annotated[float, Field(gt=0, le=86_400)] = 600.0
    """Seconds one call to the engine may take; episodes have their own, shorter bound from the recipe."""
    engine_update: Literal["whole", "changed"] = "whole"
    """What SGLang loads of a newer version: the whole model, or the elements that changed, which it can only where this
    node starts it and it keeps weights as the checkpoint does; else it loads whole models and the log says why."""
    engine_swap_timeout_s: Annotated[float, Field(gt=0, le=7200)] = 120.0
    """Seconds an engine may take to load a version; sampling pauses meanwhile. One that takes longer is restarted."""
    engine_stall_s: Annotated[float, Field(gt=0, le=3600)] = 30.0
    """Seconds without a token, of running calls or of a probe, after which the engine is restarted; at most a quarter
    of the recipe's `raas.episode_timeout_s`."""
    external: Annotated[tuple[str, ...], CommandOption(metavar="POLICY=URL")] = ()
    """Base URL of an external policy's OpenAI-compatible endpoint, as in judge=https://api.example.com/v1; repeat it.
    """
    external_key_file: Annotated[tuple[str, ...], CommandOption(metavar="POLICY=PATH")] = ()
    """File holding the key of that endpoint; repeat it."""
    engine_restart_backoff_s: Annotated[float, Field(gt=0, le=600)] = 0.5
    """Wait before the first restart of a dead engine; doubles up to 30 s while restarts keep failing."""

    environments: Annotated[
        tuple[str, ...],
        CommandOption("Environments", names=("--environment",), metavar="NAME=HOST:PORT"),
    ] = ()
    """Where the environment is served that recipes call `served:NAME`; repeat it."""
    environment_token_file: Path | None = None
    """File holding the node's token for these services; read again for each call."""
    environment_ca_file: Path | None = None
    """PEM certificates of the authorities that their certificates may come from; without it they are called without
    TLS.
    """

    work_dir: Annotated[Path, CommandOption("Folders and limits")] = Path("~/.cache/astraflow/raas")
    """Folder for mirrors, the recipe's code and engine logs; one sub-folder per node."""
    mirror_dir: Path | None = None
    """Folder for the weight mirrors; unset keeps them in /dev/shm where there is room, else in the work folder."""
    allow_recipe_code: bool = False
    """Run the Python files that come with the recipe. They may do anything this user may do."""
    max_concurrent_tasks: Annotated[int, Field(ge=0, le=65_536)] = 0
    """Tasks run at once; 0 takes the recipe's figure."""
    stay: bool = False
    """Stay joined when the run has finished, instead of leaving with exit code 0."""

    evaluation_hold_s: Annotated[float, Field(ge=0, le=3600), CommandOption("Tuning")] = 30.0
    """Longest time a newer version waits for evaluation episodes that need the current one."""
    coalesce_max_new_tokens: Annotated[int, Field(ge=0, le=1_048_576)] = 128
    """Calls up to this length that the episodes of one task make at the same moment share one engine
    request."""
    fetch_threads: Annotated[int, Field(ge=1, le=64)] = 8
    """Parts of a version fetched at a time."""
    apply_threads: Annotated[int, Field(ge=1, le=64)] = 2
    """Tiles of a version decoded and written at a time; each takes 8 MiB of memory and a core while a version is
    applied.
    """
    spool_episodes: Annotated[int, Field(ge=64, le=1_000_000)] = 4096
    """Finished episodes kept until the server has acknowledged them; sampling pauses when it is full."""
    spool_bytes: Annotated[int, Field(ge=2**24, le=2**40)] = 2**28
    """The same bound in bytes."""
    push_journal: bool = False
    """Write every push and its answer to `pushes.jsonl` in the node's folder, for audits; the newest lines are kept,
    64 to 128 MiB of them."""

    @property
    def secret_paths(self) -> tuple[Path, ...]:
        """What agents must not read: work folders of nodes, weights, and the files that this node acts by."""
        named = (self.join_file, self.token_file, self.client_cert_file, self.client_key_file)
        keys = (Path(each.partition("=")[2]) for each in self.external_key_file)
        found = (self.work_dir, self.mirror_dir, *named, self.environment_token_file, *keys)
        return tuple(path for path in found if path is not None)

    @field_validator("work_dir", "mirror_dir")
    @classmethod
    def _expand_home(cls, path: Path | None) -> Path | None:
        return path.expanduser() if path is not None else None

    @field_validator("environments")
    @classmethod
    def _environments_have_addresses(cls, given: tuple[str, ...]) -> tuple[str, ...]:
        for each in given:
            name, _, address = each.partition("=")
            if not (name.isidentifier() and re.match(_ADDRESS, address)):
                raise ValueError(f"{each!r} is not NAME=HOST:PORT; NAME has letters, digits and _")
        return given

    @property
    def environment_connections(self) -> dict[str, Connection]:
        """How to reach each served environment, by name. Raises InvalidArgumentError for a file that is missing."""
        files = DialFiles(
            token_file=self.environment_token_file, ca_file=self.environment_ca_file, insecure=self.insecure
        )
        pairs = (each.split("=", 1) for each in self.environments)
        return {name: dial(address, join_file=None, files=files) for name, address in pairs}

    @field_validator("external", "external_key_file")
    @classmethod
    def _names_a_policy(cls, given: tuple[str, ...]) -> tuple[str, ...]:
        for text in given:
            policy_id, _, value = text.partition("=")
            if not policy_id or not value:
                raise ValueError(
                    f"{text!r} is not POLICY=VALUE, for example judge=https://api.example.com/v1"
                )
        return given

    @field_validator("serve")
    @classmethod
    def _serves_each_by_some_engines(cls, given: str) -> str:
        shares = _shares(given)
        for name, number in shares:
            if not 1 <= number <= _MAX_ENGINES or [other for other, _ in shares].count(name) > 1:
                raise ValueError(f"{name}={number}: name a policy once, with 1 to {_MAX_ENGINES} engines")
        return given

    def engines_of(self, policies: Iterable[str]) -> dict[str, int]:
        """How many engines each policy of a run has here. Raises InvalidArgumentError."""
        given, engines = dict(_shares(self.serve)), dict.fromkeys(policies, 1)
        for name in given.keys() - engines.keys():
            raise InvalidArgumentError(
                f"--serve {self.serve}: nodes of this run serve no policy {name!r}. {did_you_mean(name, engines)}"
            )
        if given and "://" in self.engine:
            raise InvalidArgumentError(
                f"--serve {self.serve} is for engines that the node starts itself; the engine is {self.engine}"
            )
        return engines | given

    @field_validator("engine")
    @classmethod
    def _engine_is_known(cls, engine: str) -> str:
        if engine in (EMBEDDED_ENGINE, SGLANG_ENGINE) or engine.startswith(("http://", "https://")):
            return engine.rstrip("/")
        raise ValueError(
            f"must be `{EMBEDDED_ENGINE}`, `{SGLANG_ENGINE}` or the http:// address of a running engine"
        )


def _shares(given: str) -> list[tuple[str, int]]:
    pairs = (each.partition("=") for each in given.split(",") if each)
    return [(name, int(number)) for name, _, number in pairs]


_SHARED_WITH_CHILDREN = ("FAILPOINTS", "LOG_")


def child_environment() -> dict[str, str]:
    """This process's environment for an engine: without the node's own settings, which mean other things
    there."""
    return {name: value for name, value in os.environ.items() if _may_inherit(name)}


def _may_inherit(name: str) -> bool:
    ours = name.removeprefix(ENV_PREFIX) if name.startswith(ENV_PREFIX) else None
    return ours is None or ours.startswith(_SHARED_WITH_CHILDREN)
