"""Join strings: what they carry comes back, and what is no join string is refused without repeating a secret."""

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from astraflow.errors import InvalidArgumentError
from astraflow.join import JoinString, format_join, is_join_string, parse_join
from support.source_tree import REPOSITORY

VECTORS = json.loads(Path(REPOSITORY / "tests" / "conformance" / "join_strings.json").read_text())
PRINTABLE = st.text(st.characters(min_codepoint=0x21, max_codepoint=0x7E), max_size=64)
HOST = st.sampled_from(["localhost", "10.0.0.5", "[::1]", "dataflow.svc-1.example"])
CERTIFICATE = st.binary(min_size=4, max_size=64).map(lambda rest: b"\x30" + rest)


@given(
    host=HOST,
    port=st.integers(1, 65_535),
    ca=st.lists(CERTIFICATE, max_size=3),
    server_name=PRINTABLE,
    token=PRINTABLE,
)
def test_what_a_join_string_carries_comes_back(
    host: str, port: int, ca: list[bytes], server_name: str, token: str
) -> None:
    join = JoinString(
        address=f"{host}:{port}", ca=tuple(ca), public_ca=not ca, server_name=server_name, token=token
    )
    text = format_join(join)
    assert is_join_string(text)
    assert parse_join(f"  {text}\n") == join
    assert "token=" not in repr(join).replace(server_name, "")


@pytest.mark.parametrize("vector", VECTORS["good"], ids=lambda vector: vector["case"])
def test_the_golden_strings_say_the_same_in_every_language(vector: Any) -> None:
    join = parse_join(vector["text"])
    content = {
        "address": join.address,
        "ca": [base64.b64encode(each).decode() for each in join.ca],
        "public_ca": join.public_ca,
        "server_name": join.server_name,
        "token": join.token,
    }
    assert content == vector["content"]
    assert format_join(join) == vector.get("canonical", vector["text"])


@pytest.mark.parametrize("vector", VECTORS["bad"], ids=lambda vector: vector["case"])
def test_what_is_no_join_string_is_refused_with_the_remedy(vector: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=vector["says"]) as error:
        parse_join(vector["text"])
    assert "s3cret" not in error.value.message


@given(st.text(max_size=200))
def test_nothing_but_a_request_error_comes_of_garbage(garbage: str) -> None:
    for text in (garbage, f"af1.{garbage}"):
        with pytest.raises(InvalidArgumentError):
            parse_join(text)
