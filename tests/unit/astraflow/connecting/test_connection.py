"""What a connection takes, where its token comes from, and what files beside a join string replace."""

from pathlib import Path
from typing import Any

import pytest

from astraflow.connecting.connection import Connection, DialFiles, dial
from astraflow.errors import InvalidArgumentError, UnavailableError
from astraflow.join import JoinString, format_join

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


def test_the_token_of_a_join_file_is_read_again_for_each_call(tmp_path: Path) -> None:
    file = tmp_path / "join"
    file.write_text(format_join(JOIN) + "\n")
    connection = dial("", join_file=file, files=DialFiles())
    file.write_text(format_join(JoinString(address="other:1", public_ca=True, token="second")))
    assert (connection.address, connection.current_token()) == (JOIN.address, "second")


def test_files_replace_what_a_join_string_says(tmp_path: Path) -> None:
    token, ca = tmp_path / "token", tmp_path / "ca.pem"
    token.write_text("mine")
    ca.write_text("my authority")
    files = DialFiles(token_file=token, ca_file=ca, server_name="inside")
    connection = dial(format_join(JOIN), join_file=None, files=files)
    assert (connection.current_token(), connection.ca, connection.server_name) == (
        "mine",
        b"my authority",
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
