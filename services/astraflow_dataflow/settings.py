"""Settings of the dataflow server: its Redis, and the few times that no recipe decides.

Nothing about a run is set here; that comes from the run's recipe. `__main__` builds them from options and `ASTRAFLOW_*`
variables, `server` passes the parts on.
"""

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, FilePath, field_validator, model_validator

from astraflow_dataflow.records import Level
from astraflow_kit.settings import CommandOption, DaemonSettings, Port
from astraflow_weights.daemon_settings import StoreAddress


@dataclass(frozen=True, kw_only=True)
class PluginLimits:
    """What the process of a run's foreign plug-ins may take."""

    start_timeout_s: float
    call_timeout_s: float
    memory_mb: int
    in_process: tuple[str, ...] = ()
    """Packages whose plug-ins are none of it."""

    def is_foreign(self, use: str) -> bool:
        """Whether a plug-in `module.path:Name` runs in a process of its run."""
        module = use.partition(":")[0]
        ours = ("astraflow_dataflow.plugins", *self.in_process)
        return not any(module == own or module.startswith(f"{own}.") for own in ours)


def plugin_environment() -> dict[str, str]:
    """This process's environment for foreign plug-ins: its modules, and none of the server's own settings."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("ASTRAFLOW_")}
    return kept | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


class DataflowServerSettings(StoreAddress):
    """What a dataflow server can be told. Only `redis` is required."""

    redis: Annotated[
        str,
        Field(pattern=r"^(redis|rediss|unix)://|^rediss?\+cluster://[^/?]+(/0?)?(\?.*)?$"),
        CommandOption("The data", metavar="redis://HOST:PORT/DB"),
    ]
    """Redis 7.0 or newer, or Valkey, with an append-only file; a cluster as redis+cluster://HOST:PORT,HOST:PORT, of
    which one node must answer.
    """
    redis_password_file: FilePath | None = None
    """File holding its password; read again at every connection."""
    payloads: Annotated[str | None, Field(pattern=r"^(redis|rediss|unix|s3|file)://")] = None
    """Where payloads are kept instead: another Redis (redis://HOST:PORT/DB), or an object store (s3://BUCKET/PREFIX, or
    file:///FOLDER that all servers share). Redis then holds what refers to them. The same for every server of a Redis.
    """
    payloads_password_file: FilePath | None = None
    """File holding the password of that other Redis; read again at every connection."""
    allow_volatile: bool = False
    """Accept a Redis without an append-only file: what was acknowledged is lost when it restarts."""
    durability: Level = Level.MEMORY
    """What acknowledgements wait for: `memory`, the Redis host's disk (`fsynced`) or a replica (`replicated`)."""
    allow_recipe_code: bool = False
    """Run the Python files that come with a recipe (data set, curators, filters, selector). They may do anything this
    user may do.
    """
    processes: Annotated[int, Field(ge=1, le=64)] = 1
    """Server processes behind the address, each as good as a core. Callers are spread over them by connection; process
    n has its pages and probes at their ports + n - 1.
    """
    share_port: Annotated[bool, CommandOption(hidden=True)] = False
    """Whether others listen on the port as well; set by the process that starts several."""
    work_dir: Path = Path("~/.cache/astraflow/dataflow")
    """Folder for the code of recipes."""
    batch_lease_s: Annotated[float, Field(ge=1, le=86_400)] = 120.0
    """Time in which a trainer renews the batch it holds; expiry raises an alarm and never unbinds."""
    node_silence_s: Annotated[float, Field(ge=0.3, le=3600)] = 10.0
    """Time without a message of a node after which its working session ends; nodes say something every 2 s."""
    evaluation_patience_s: Annotated[float, Field(ge=0, le=86_400)] = 45.0
    """Time without progress after which an evaluation of a superseded version is given up."""

    plugin_start_timeout_s: Annotated[float, Field(gt=0, le=3600), CommandOption("Recipes' plug-ins")] = 20.0
    """Time in which plug-ins of a recipe are imported and made, those of each kind (data set, filters, …) together."""
    plugin_call_timeout_s: Annotated[float, Field(gt=0, le=3600)] = 30.0
    """Time in which one answers a call; a process that takes longer is killed and the next one asked."""
    plugin_memory_mb: Annotated[int, Field(ge=64, le=1_048_576)] = 2048
    """Memory in MiB that the process of a run's plug-ins of one kind may use."""
    in_process_plugins: Annotated[tuple[str, ...], CommandOption(metavar="MODULE")] = ()
    """Packages whose plug-ins are called in the server's own process: faster, but one that hangs or ends its process
    takes all runs along. Those of `astraflow_dataflow.plugins` always are.
    """

    store_grants: Annotated[bool, CommandOption("Grants to nodes")] = False
    """Sign reads of a run's s3:// store for its nodes, which then need no credentials: give `store_endpoint_url` as
    nodes reach the store, and credentials that may get and list. The server itself never asks the store.
    """
    store_grant_life_s: Annotated[float, Field(ge=60, le=604_800)] = 900.0
    """How long what was signed is valid; nodes ask for more by themselves."""

    scaler_port: Annotated[Port | None, CommandOption("Autoscaling")] = None
    """Port of a listener that answers KEDA, on `host` and for client certificates only; 0 takes a free one. Off unless
    given.
    """
    scaler_client_ca_file: FilePath | None = None
    """PEM certificates of the authority whose clients may ask it."""

    @model_validator(mode="after")
    def _scaler_is_safe(self) -> Self:
        if (self.scaler_port is None) != (self.scaler_client_ca_file is None):
            raise ValueError("scaler_port and scaler_client_ca_file go together; give both or neither")
        if self.scaler_port is not None and self.tls_cert_file is None:
            raise ValueError(
                "scaler_port needs tls_cert_file and tls_key_file: KEDA shows no token, only a certificate"
            )
        return self

    @property
    def scaler(self) -> DaemonSettings:
        """Settings of the scaler's listener: the same server at another port, with authorities of its own."""
        return self.model_copy(
            update={"grpc_port": self.scaler_port, "tls_client_ca_file": self.scaler_client_ca_file}
        )

    @property
    def plugin_limits(self) -> PluginLimits:
        """What foreign plug-ins may take."""
        return PluginLimits(
            start_timeout_s=self.plugin_start_timeout_s,
            call_timeout_s=self.plugin_call_timeout_s,
            memory_mb=self.plugin_memory_mb,
            in_process=self.in_process_plugins,
        )

    @property
    def capabilities(self) -> list[str]:
        """Optional features that are on, as `GetServerInfo` names them."""
        on = {
            "durable_acknowledgements": self.durability is not Level.MEMORY,
            "recipe_code": self.allow_recipe_code,
            "store_grants": self.store_grants,
        }
        return [name for name, is_on in on.items() if is_on]

    @field_validator("work_dir")
    @classmethod
    def _expand_home(cls, path: Path) -> Path:
        return path.expanduser()
