"""Settings of a daemon: frozen, typed, read once at start from options and `ASTRAFLOW_*` variables.

Invariant: nothing outside this module reads the environment, and nothing starts with a setting that was
misspelt, out of bounds or unsafe (a reachable address without TLS and tokens). Each daemon subclasses
`DaemonSettings` beside the class it configures; `daemon_command` makes its command line of it.
"""

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import Field, FilePath, ValidationError, field_validator, model_validator
from pydantic_core import ErrorDetails
from pydantic_settings import BaseSettings, SettingsConfigDict

from astraflow.connecting.connection import is_loopback
from astraflow.errors import RequestError
from astraflow_kit import failpoints
from astraflow_kit.nearest import did_you_mean, nearest_names
from astraflow_kit.setting_names import NAMES

ENV_PREFIX = "ASTRAFLOW_"
# A variable this close to a setting is a misspelling; one further away is something else's.
_MISSPELLING_CUTOFF = 0.85

S = TypeVar("S", bound="ProcessSettings")
Port = Annotated[int, Field(ge=0, le=65535)]


@dataclass(frozen=True)
class CommandOption:
    """How a setting looks on the command line where its name, type and docstring do not say it; annotates a field."""

    panel: str = ""
    """Panel of the help that begins here and goes on until the next."""
    names: tuple[str, ...] = ()
    metavar: str | None = None
    hidden: bool = False
    """Accepted, not shown in the help."""
    refused: Callable[[str], str | None] | None = None
    """Why a value must not stand on a command line, where every process of the machine reads it; None: it may."""


_HIDDEN = CommandOption(hidden=True)


class SettingsError(RequestError):
    """A setting is unknown, has a wrong value, or would expose the daemon."""

    reason, code = "INVALID_SETTINGS", "INVALID_ARGUMENT"


class ProcessSettings(BaseSettings):
    """What every process can be told. Secrets come as `*_file` paths, never as values."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX,
        frozen=True,
        extra="forbid",
        env_ignore_empty=True,
        use_attribute_docstrings=True,  # they are the help of the options
    )

    address_file: Annotated[Path | None, CommandOption("Process and log")] = None
    """Where to write the bound ports and the pid as JSON, for whoever started this process."""
    parent_pid: Annotated[int, Field(gt=0)] | None = None
    """Process to die with; set by the launcher."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe event that is written."""
    log_format: Literal["auto", "json", "console"] = "auto"
    """JSON lines, or console text; `auto` chooses console on a terminal."""
    drain_timeout_s: Annotated[float, Field(gt=0, le=3600)] = 30.0
    """Seconds between the first stop signal and a hard stop."""
    traces: bool = False
    """Export spans of OpenTelemetry to `OTEL_EXPORTER_OTLP_ENDPOINT`; needs `astraflow[traces]`."""
    failpoints: Annotated[str, _HIDDEN] = ""
    """Failpoints to arm, for tests: see `astraflow_kit.failpoints`."""
    failpoints_seed: Annotated[int, _HIDDEN] = 0
    """Seed of the failpoints' draws."""
    failpoints_log: Annotated[Path | None, _HIDDEN] = None
    """File that records failpoint hits."""

    @field_validator("failpoints")
    @classmethod
    def _failpoints_are_known(cls, spec: str) -> str:
        failpoints.parse(spec)
        return spec


class DaemonSettings(ProcessSettings):
    """What every daemon with a gRPC server and pages for people can be told."""

    host: Annotated[str, CommandOption("Serving")] = "127.0.0.1"
    """Address of the gRPC server. Anything but loopback needs TLS and tokens, or `insecure`."""
    grpc_port: Annotated[Port, CommandOption(names=("--port", "--grpc-port"))] = 0
    """Port of the gRPC server; 0 takes a free one and reports it in the address file."""
    tls_cert_file: FilePath | None = None
    """PEM certificate chain of the gRPC server and the pages; needs `tls_key_file`. Read again when it changes."""
    tls_key_file: FilePath | None = None
    """PEM private key of it (ECDSA or RSA); needs `tls_cert_file`."""
    tls_client_ca_file: FilePath | None = None
    """PEM certificates of the authority whose clients may connect: mutual TLS, beside tokens."""
    token_keys_file: FilePath | None = None
    """JWKS file with the one or two Ed25519 public keys that verify tokens. Read again when it changes."""
    token_audience: Annotated[str, Field(min_length=1, max_length=256)] = "astraflow"
    """What tokens must name as `aud`: tokens of another installation with the same key are refused."""
    revoked_tokens_file: FilePath | None = None
    """Ids (`jti`) of tokens that are refused, one a line; `#` starts a comment. Read again when it changes."""
    insecure: bool = False
    """Allow a reachable address without TLS and tokens: whoever reaches it reads and changes everything."""
    http_host: Annotated[str, CommandOption("HTTP pages")] = "127.0.0.1"
    """Address of the pages. Anything but loopback needs TLS and tokens, or `insecure_http`."""
    http_port: Port = 0
    """Port of the pages (/status, /metrics, /healthz, /readyz); 0 takes a free one."""
    http_allowed_hosts: Annotated[tuple[str, ...], CommandOption(names=("--http-allowed-host",))] = ()
    """Names beside `localhost`, `http_host` and addresses by which the pages may be asked, which keeps web sites of
    others from reading them through a browser; `*` allows all. The probes answer by any name.
    """
    insecure_http: bool = False
    """Allow the pages on a reachable address without TLS and tokens: whoever reaches it reads status and metrics."""
    probe_host: str = "127.0.0.1"
    """Address of the probe listener; it may be reachable, for it tells nothing but whether the daemon works."""
    probe_port: Port | None = None
    """Port of a plaintext listener with only /healthz, /startedz, /readyz; 0 takes a free one. Off unless given."""

    @model_validator(mode="after")
    def _address_is_safe(self) -> Self:
        if (self.tls_cert_file is None) != (self.tls_key_file is None):
            raise ValueError("tls_cert_file and tls_key_file go together; give both or neither")
        if self.tls_client_ca_file is not None and self.tls_cert_file is None:
            raise ValueError(
                "tls_client_ca_file needs tls_cert_file and tls_key_file; without TLS nobody shows one"
            )
        if self.revoked_tokens_file is not None and self.token_keys_file is None:
            raise ValueError(
                "revoked_tokens_file needs token_keys_file; without keys no token is accepted at all"
            )
        protected = self.tls_cert_file is not None and self.token_keys_file is not None
        if not (is_loopback(self.host) or protected or self.insecure):
            raise ValueError(
                f"host {self.host!r} is reachable from other machines without TLS and tokens; set the "
                "tls_*_file pair and token_keys_file, or bind 127.0.0.1, or accept the risk with insecure"
            )
        if not (is_loopback(self.http_host) or protected or self.insecure_http):
            raise ValueError(
                f"http_host {self.http_host!r} is reachable from other machines without TLS and tokens; set the "
                "tls_*_file pair and token_keys_file, or bind 127.0.0.1, or accept the risk with insecure_http"
            )
        return self


def load(kind: type[S], options: Mapping[str, object] | None = None) -> S:
    """Build settings of `kind`: `options` (command line) first, then environment, then defaults.

    An option that is None counts as not given. Raises SettingsError listing every problem at once.
    """
    given: dict[str, Any] = {name: value for name, value in (options or {}).items() if value is not None}
    _refuse_misspelt_variables(kind)
    try:
        return kind(**given)
    except ValidationError as error:
        problems = [_problem(kind, detail, given=given) for detail in error.errors(include_url=False)]
        raise SettingsError("; ".join(problems)) from error


def read_secret(path: Path) -> str:
    """Content of a `*_file` secret without its trailing newline; read at each use, so that it can be rotated.

    Raises SettingsError when the file is missing, unreadable or empty.
    """
    try:
        secret = path.read_text().strip()
    except OSError as error:
        remedy = "mount it or fix its mode"
        raise SettingsError(f"secret file {path} cannot be read: {error.strerror}; {remedy}") from error
    if not secret:
        raise SettingsError(f"secret file {path} is empty; write the secret into it")
    return secret


def environment_of(settings: ProcessSettings) -> dict[str, str]:
    """The environment of another process with these settings, whatever options and variables they came from."""
    ours = {f"{ENV_PREFIX}{name.upper()}" for name in type(settings).model_fields}
    given = settings.model_dump(mode="json", exclude_defaults=True)
    return {name: value for name, value in os.environ.items() if name not in ours} | {
        f"{ENV_PREFIX}{name.upper()}": value if isinstance(value, str) else json.dumps(value)
        for name, value in given.items()
    }


def otel_variable(*names: str) -> str:
    """The first of OpenTelemetry's own variables that is set; empty when none is."""
    return next((said for name in names if (said := os.environ.get(name))), "")


def given_up(settings: DaemonSettings) -> str:
    """What a reachable address lacks, and what that lets strangers do; empty when it has TLS and tokens."""
    lacks = []
    if settings.tls_cert_file is None:
        lacks.append("no TLS: whoever is on the way reads and alters everything, tokens included")
    if settings.token_keys_file is None:
        lacks.append("no tokens: whoever reaches the address acts in every role on every run")
    return "; ".join(lacks)


def _refuse_misspelt_variables(kind: type[ProcessSettings]) -> None:
    prefix = str(kind.model_config.get("env_prefix", ENV_PREFIX))
    known = [f"{prefix}{name}".upper() for name in sorted(NAMES | kind.model_fields.keys())]
    for variable in os.environ:
        if variable.startswith(prefix) and variable not in known:
            close = nearest_names(variable, known, cutoff=_MISSPELLING_CUTOFF)
            if close:
                raise SettingsError(f"variable {variable} is not a setting. Did you mean {close[0]}?")


def _problem(kind: type[ProcessSettings], detail: ErrorDetails, *, given: Mapping[str, object]) -> str:
    complaint = detail["msg"].removeprefix("Value error, ")
    if not detail["loc"]:
        return complaint
    name = str(detail["loc"][0])
    if detail["type"] == "extra_forbidden":
        return f"unknown setting {name!r}. {did_you_mean(name, kind.model_fields)}"
    prefix = str(kind.model_config.get("env_prefix", ENV_PREFIX))
    source = f"option {name}" if name in given else f"{prefix}{name}".upper()
    return f"{source} = {detail['input']!r}: {complaint}"
