"""Why a connection that should work does not: one handshake of our own, because gRPC only says "unavailable".

Invariant: it changes nothing about what is trusted, and nothing is sent over what it opens. Asked by `client` when the
first call to a server fails.
"""

import socket
import ssl
import tempfile
import time
from pathlib import Path

from astraflow.connecting.connection import Connection

_TIMEOUT_S = 3.0
# Numbers of OpenSSL's verification results.
_NOT_YET_VALID, _EXPIRED, _NAME_MISMATCH, _ADDRESS_MISMATCH = 9, 10, 62, 64


def trust_problem(connection: Connection) -> str | None:
    """What is wrong between both sides, with the remedy; None where a handshake shows nothing. Blocks for seconds."""
    try:
        with socket.create_connection((connection.host, connection.port), timeout=_TIMEOUT_S) as opened:
            return (
                _tls_problem(connection, opened)
                if connection.is_secure
                else _plain_problem(connection, opened)
            )
    except OSError:  # not reachable at all: what gRPC said is right
        return None


def _plain_problem(connection: Connection, opened: socket.socket) -> str | None:
    """Whether TLS would be answered, whoever it is: nothing is sent over it."""
    anyone = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    anyone.check_hostname, anyone.verify_mode = False, ssl.CERT_NONE
    try:
        anyone.wrap_socket(opened, server_hostname=connection.host).close()
    except ssl.SSLError as error:
        if "ALERT" not in (error.reason or ""):  # an alert is an answer as well
            return None
    return (
        f"the server at {connection.address} speaks TLS, and this side does not say whom it trusts: give a join "
        "string, its authority's certificate (--ca-file), or --public-ca"
    )


def _tls_problem(connection: Connection, opened: socket.socket) -> str | None:
    name = connection.server_name or connection.host
    try:
        with _context(connection).wrap_socket(opened, server_hostname=name) as secured:
            # After the handshake comes its preface, or what it makes of our certificate: an alert, or nothing at all.
            if not secured.recv(1):
                return _unwanted(connection)
    except ssl.SSLCertVerificationError as error:
        return f"the server at {connection.address} is not trusted: {_why_untrusted(error, name)}"
    except ssl.SSLError as error:
        return _why_refused(connection, error.reason or "")
    return None


def _context(connection: Connection) -> ssl.SSLContext:
    context = ssl.create_default_context(cadata=connection.ca.decode() or None)
    context.set_alpn_protocols(["h2"])
    if connection.client_cert:
        with tempfile.TemporaryDirectory() as folder:  # the module reads them from files only
            pair = Path(folder, "pair.pem")
            pair.touch(0o600)
            pair.write_bytes(connection.client_key + b"\n" + connection.client_cert)
            context.load_cert_chain(pair)
    return context


def _why_untrusted(error: ssl.SSLCertVerificationError, name: str) -> str:
    now = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    if error.verify_code == _EXPIRED:
        return f"its certificate, or that of its authority, has expired (this machine's clock says {now}); renew it"
    if error.verify_code == _NOT_YET_VALID:
        return f"its certificate is not valid yet: this machine's clock says {now}; correct the clocks"
    if error.verify_code in (_NAME_MISMATCH, _ADDRESS_MISMATCH):
        return (
            f"its certificate is not for {name!r}; reach it by a name that the certificate carries, or give that name "
            "with --server-name"
        )
    return (
        f"its certificate does not come from the given authority ({error.verify_message}); get the join string or the "
        "CA file of this server"
    )


def _why_refused(connection: Connection, reason: str) -> str | None:
    if "WRONG_VERSION_NUMBER" in reason or "RECORD_LAYER_FAILURE" in reason:
        return (
            f"the server at {connection.address} does not speak TLS: start it with tls_cert_file and tls_key_file, or "
            "reach it by its plain address where nobody else can listen"
        )
    # An alert: of all that a server can object to, our certificate is what the settings say.
    return _unwanted(connection) if "ALERT" in reason else None


def _unwanted(connection: Connection) -> str:
    shown = (
        "does not accept the client certificate" if connection.client_cert else "wants a client certificate"
    )
    return (
        f"the server at {connection.address} {shown}: give one of its authority with --client-cert-file and "
        "--client-key-file"
    )
