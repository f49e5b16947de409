"""What a connection takes, where its token comes from, and what files beside a join string replace."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from astraflow.connecting.connection import Connection, DialFiles, dial
from astraflow.errors import InvalidArgumentError, UnavailableError
from astraflow.join import JoinString, format_join
from support.tls import Authority

JOIN = JoinString(address="dataflow.example:7070", ca=(b"\x30\x03\x02\x01\x05",), token="first")


@pytest.mark.parametrize("address", ["", "host", "host:0", "host:65536", "http://h:1", "::1:7070", "a b:1"])
def test_an_address_that_is_none_is_refused_with_its_form(address: str) -> None:
    with pytest.raises(InvalidArgumentError, match="HOST:PORT"):
        Connection(address)


@pytest.mark.parametrize(
    ("parts", "says"),
    [
        ({"token": "secret"}, "in the clear.*insecure"),
        ({"server_name": "x"}, "for TLS"),
        ({"ca": b"c", "public_ca": True}, "exclude each other"),
        ({"ca": b"c", "client_cert": b"c"}, "go together"),
        ({"client_cert": b"c", "client_key": b"k"}, "for TLS"),
    ],
)
def test_parts_that_do_not_fit_are_refused(parts: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidArgumentError, match=says) as error:
        Connection("10.0.0.5:7070", **parts)
    assert "secret" not in error.value.message


@pytest.mark.parametrize(
    "parts", [{"public_ca": True}, {"ca": b"c"}, {"insecure": True}, {"address": "127.0.0.1:1"}]
)
def test_a_token_goes_over_tls_to_this_machine_or_at_the_callers_risk(parts: dict[str, Any]) -> None:
    connection = Connection(**{"address": "10.0.0.5:7070", "token": "secret", **parts})
    assert connection.current_token() == "secret"
    assert "secret" not in repr(connection)


def test_a_token_file_and_a_function_are_asked_for_each_call(tmp_path: Path) -> None:
    file, values = tmp_path / "token", iter(("a", "b"))
    file.write_text("first\n")
    from_file = Connection("127.0.0.1:1", token=file)
    from_function = Connection("127.0.0.1:1", token=lambda: next(values))
    assert (from_file.current_token(), from_function.current_token()) == ("first", "a")
    file.write_text("second\n")
    assert (from_file.current_token(), from_function.current_token()) == ("second", "b")
    file.unlink()
    with pytest.raises(UnavailableError, match="token cannot be read"):
        from_file.current_token()


def test_a_join_string_says_all_of_it() -> None:
    connection = Connection.of(format_join(JOIN))
    assert (connection.address, connection.current_token(), connection.is_secure) == (
        JOIN.address,
        "first",
        True,
    )
    assert connection.ca.startswith(b"-----BEGIN CERTIFICATE-----")


def test_a_join_file_is_read_again_for_each_call(tmp_path: Path) -> None:
    file = tmp_path / "join"
    file.write_text(format_join(JOIN) + "\n")
    connection = Connection.of(file)
    assert connection.current() is connection, "nothing has changed"
    file.write_text(format_join(JoinString(address="other:1", public_ca=True, token="second")))
    assert connection.current_token() == "second"
    assert (connection.current().address, connection.current().public_ca) == ("other:1", True)


@pytest.mark.parametrize("broken", [b"", b"af1.abc", None])
def test_a_join_file_that_is_not_usable_any_more_leaves_in_force_what_it_said(
    tmp_path: Path, broken: bytes | None, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "join"
    file.write_text(format_join(JOIN))
    connection = dial("", join_file=file, files=DialFiles())
    file.unlink() if broken is None else file.write_bytes(broken)
    for _ in range(2):
        assert (connection.current(), connection.current_token()) == (connection, "first")
    (said,) = caplog.messages
    assert f"join file {file}" in said
    file.write_text(format_join(replace(JOIN, address="other:1")))
    assert connection.current().address == "other:1"


def test_a_certificate_is_not_shown_before_its_key_is_there(tmp_path: Path) -> None:
    pairs = []
    for name in ("old", "new"):
        pair = Authority.create(tmp_path / name).client()
        pairs.append((pair.certificate.read_bytes(), pair.key.read_bytes()))
    files = DialFiles(public_ca=True, client_cert_file=tmp_path / "crt", client_key_file=tmp_path / "key")
    (tmp_path / "crt").write_bytes(pairs[0][0])
    (tmp_path / "key").write_bytes(pairs[0][1])
    connection = dial("h:1", join_file=None, files=files)
    (tmp_path / "crt").write_bytes(pairs[1][0])
    assert (connection.current().client_cert, connection.current().client_key) == pairs[0]
    (tmp_path / "key").write_bytes(pairs[1][1])
    assert (connection.current().client_cert, connection.current().client_key) == pairs[1]


def test_files_replace_what_a_join_string_says(tmp_path: Path) -> None:
    token, ca = tmp_path / "token", tmp_path / "ca.pem"
    token.write_text("mine")
    ca.write_bytes(Authority.create(tmp_path / "authority").pem)
    files = DialFiles(token_file=token, ca_file=ca, server_name="inside")
    connection = dial(format_join(JOIN), join_file=None, files=files)
    assert (connection.current_token(), connection.ca, connection.server_name) == (
        "mine",
        ca.read_bytes(),
        "inside",
    )
    assert dial(format_join(JOIN), join_file=None, files=DialFiles(public_ca=True)).public_ca


@pytest.mark.parametrize(
    ("target", "file", "says"),
    [
        ("", None, "neither of join and join_file"),
        ("h:1", "join", "both of join and join_file"),
        ("", "nowhere", "join file .*nowhere cannot be read"),
        ("", "empty", "join file .*empty is empty"),
        ("", "damaged", "join file .*damaged: the join string is damaged"),
    ],
)
def test_what_names_no_server_is_refused(tmp_path: Path, target: str, file: str | None, says: str) -> None:
    (tmp_path / "join").write_text(format_join(JOIN))
    (tmp_path / "empty").write_text("\n")
    (tmp_path / "damaged").write_text("af1.abc")
    with pytest.raises(InvalidArgumentError, match=says):
        dial(target, join_file=tmp_path / file if file else None, files=DialFiles())


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({"ca_file": "noise"}, "CA file .*noise holds no certificate in PEM"),
        ({"public_ca": True, "client_cert_file": "noise", "client_key_file": "noise"}, "no pair in PEM"),
    ],
)
def test_a_file_that_tls_cannot_use_is_refused(tmp_path: Path, files: dict[str, Any], says: str) -> None:
    (tmp_path / "noise").write_text("noise")
    found = {name: tmp_path / value if name.endswith("_file") else value for name, value in files.items()}
    with pytest.raises(InvalidArgumentError, match=says):
        dial("h:1", join_file=None, files=DialFiles(**found))
