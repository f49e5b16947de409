"""`astraflow health DAEMON`: whether a daemon of this machine works, for orchestrators that run a command.

Invariant: it needs neither a shell nor curl, only the daemon's own variables: the address file says where to ask.
"""

import http.client
import json
import ssl
import urllib.error
import urllib.request
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from astraflow.commands.wording import print_json, say
from astraflow.errors import InvalidArgumentError

app = typer.Typer(add_completion=False)

_SICK = 1
_MAX_BYTES = 65_536


class Daemon(StrEnum):
    """What can be asked."""

    DATAFLOW = "dataflow"
    RAAS = "raas"
    TRAINER = "trainer"
    ENVIRONMENT = "environment"


@app.command()
def health(
    daemon: Annotated[
        Daemon, typer.Argument(metavar="DAEMON", help="dataflow, raas, trainer or environment.")
    ],
    ready: Annotated[bool, typer.Option("--ready", help="Ask whether it can do its work now.")] = False,
    started: Annotated[bool, typer.Option("--started", help="Ask whether it has started.")] = False,
    address_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", envvar="ASTRAFLOW_ADDRESS_FILE", help="Where it says its ports."),
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=65_535,
            envvar=["ASTRAFLOW_PROBE_PORT", "ASTRAFLOW_HTTP_PORT"],
            help="Its probe port, or that of its pages.",
        ),
    ] = None,
    timeout_s: Annotated[float, typer.Option(min=0.1, max=60, help="Longest wait for its answer.")] = 3.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Ask a daemon of this machine whether it answers; status 0 when it does, 1 when not, with the reason.

    It is found by its address file or its port, both also from the variables that it was started with.
    """
    if ready and started:
        raise InvalidArgumentError("--ready and --started are two questions; ask one")
    page = "readyz" if ready else "startedz" if started else "healthz"
    address = _address(address_file, port)
    reason = (
        _ask(address, page, timeout_s=timeout_s)
        if address
        else f"{address_file} is not there yet: it has not started"
    )
    if as_json:
        print_json(
            {"daemon": daemon.value, "question": page, "address": address, "ok": not reason, "reason": reason}
        )
    else:
        say(f"{daemon.value} {page}: {reason or 'ok'}")
    if reason:
        raise typer.Exit(_SICK)


def _address(address_file: Path | None, port: int | None) -> str:
    """Where to ask; empty before the daemon has published it."""
    if address_file is None:
        if not port:
            raise InvalidArgumentError(
                "say where the daemon is: --address-file FILE (ASTRAFLOW_ADDRESS_FILE), as it was given, or --port"
            )
        return f"127.0.0.1:{port}"
    if not address_file.exists():
        return ""
    published = json.loads(address_file.read_text())
    host, _, bound = str(published.get("probe") or published["http"]).rpartition(":")
    # What listens on every address is asked on this machine's own.
    return f"{'127.0.0.1' if host in ('0.0.0.0', '[::]') else host}:{bound}"


def _ask(address: str, page: str, *, timeout_s: float) -> str:
    """Why the daemon does not say yes; empty when it does. Pages may have TLS, the probe listener never has."""
    reason = ""
    for scheme in ("http", "https"):
        try:
            with urllib.request.urlopen(f"{scheme}://{address}/{page}", timeout=timeout_s, context=_anyone()):
                return ""
        except urllib.error.HTTPError as error:
            return _said(error.code, error.read(_MAX_BYTES))
        except (OSError, http.client.HTTPException) as error:
            reason = reason or f"no answer at {address}: {getattr(error, 'reason', error)}"
    return reason


def _said(status: int, body: bytes) -> str:
    try:
        checks = [check for check in json.loads(body)["checks"] if not check["ready"]]
        return "; ".join(f"{check['name']}: {check['reason']}" for check in checks) or f"status {status}"
    except (ValueError, KeyError, TypeError):
        return body.decode(errors="replace").strip() or f"status {status}"


def _anyone() -> ssl.SSLContext:
    """Nothing secret is sent and the answer is one bit; the certificate is for callers of other machines."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context
