"""Why a connection does not work: each way in which both sides cannot prove who they are, over real handshakes."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from astraflow.client import AsyncClient, Client, Connection, RetryPolicy
from astraflow.connecting.trust import trust_problem
from astraflow.errors import UnimplementedError, UntrustedServerError
from astraflow_launcher.issuing.authority import Issued
from support.tls import Authority, tls_server

ONCE = RetryPolicy(total_s=0.0)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority.create(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority.create(tmp_path_factory.mktemp("stranger"))


@pytest.fixture(scope="module")
def good(authority: Authority) -> Issued:
    return authority.server()


def pair(issued: Issued) -> dict[str, Any]:
    return {"client_cert": issued.certificate.read_bytes(), "client_key": issued.key.read_bytes()}


@pytest.fixture(scope="module")
def client_pair(authority: Authority) -> dict[str, Any]:
    return pair(authority.client())


def test_both_sides_that_trust_each_other_have_no_problem(
    authority: Authority, good: Issued, client_pair: dict[str, Any]
) -> None:
    with tls_server(good) as address:
        assert trust_problem(Connection(address, ca=authority.pem)) is None
        assert trust_problem(Connection(address, ca=authority.pem, server_name="localhost")) is None
    with tls_server(good, client_ca=authority.pem) as address:
        assert trust_problem(Connection(address, ca=authority.pem, **client_pair)) is None
    with tls_server(None) as address:
        assert trust_problem(Connection(address)) is None
    assert trust_problem(Connection("127.0.0.1:1", ca=authority.pem)) is None


@dataclass(frozen=True)
class Row:
    """What the server shows, what the caller expects, and what is said about it."""

    says: str
    shown: Callable[[Authority, Authority], Issued | None]
    expects: Callable[[Authority], dict[str, Any]] = lambda authority: {"ca": authority.pem}


ROWS = {
    "another authority": Row(
        "does not come from the given authority", lambda _, other: other.server("wrong")
    ),
    "an expired certificate": Row(
        "has expired .this machine's clock says", lambda ours, _: ours.server("old", hours=-25)
    ),
    "a clock that is an hour behind": Row(
        "not valid yet: this machine's clock says .* correct the clocks",
        lambda ours, _: ours.server("early", hours=1),
    ),
    "another name": Row(
        "is not for 'inside.example'.*--server-name",
        lambda ours, _: ours.server("named"),
        lambda ours: {"ca": ours.pem, "server_name": "inside.example"},
    ),
    "no TLS at the server": Row("does not speak TLS", lambda *_: None),
    "no TLS at the caller": Row(
        "speaks TLS, and this side does not say whom it trusts.*--ca-file",
        lambda ours, _: ours.server("plain"),
        lambda _: {},
    ),
    "a public authority": Row(
        "does not come from the given authority",
        lambda ours, _: ours.server("public"),
        lambda _: {"public_ca": True},
    ),
}


@pytest.mark.parametrize("case", ROWS)
async def test_what_is_wrong_is_named_by_the_first_call_of_both_twins(
    authority: Authority, stranger: Authority, case: str, tmp_path: Path
) -> None:
    row = ROWS[case]
    ours = Authority.create(tmp_path)
    with tls_server(row.shown(ours, stranger)) as address:
        connection = Connection(address, **row.expects(ours))
        with Client(connection, retry=ONCE) as client, pytest.raises(UntrustedServerError, match=row.says):
            client.server_info(timeout_s=5)
        async with AsyncClient(connection, retry=ONCE) as twin:
            with pytest.raises(UntrustedServerError, match=row.says):
                await twin.server_info(timeout_s=5)


def test_a_server_that_asks_for_a_certificate_says_so(
    authority: Authority, stranger: Authority, good: Issued
) -> None:
    with tls_server(good, client_ca=authority.pem) as address:
        for parts, says in (({}, "wants a client certificate"), (pair(stranger.client()), "does not accept")):
            found = trust_problem(Connection(address, ca=authority.pem, **parts))
            assert found is not None
            assert says in found
            assert "--client-cert-file" in found


def test_calls_go_over_tls_also_by_another_name_and_with_a_certificate(
    authority: Authority, good: Issued, client_pair: dict[str, Any]
) -> None:
    with tls_server(good, client_ca=authority.pem) as address:
        for name in ("", "localhost"):
            connection = Connection(address, ca=authority.pem, token="t", server_name=name, **client_pair)
            # It has no services: that it says so came over the connection.
            with Client(connection, retry=ONCE) as client, pytest.raises(UnimplementedError):
                client.server_info(timeout_s=5)
