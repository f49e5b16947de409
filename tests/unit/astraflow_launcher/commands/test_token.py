"""`astraflow ca`, `token` and `join-token` as a user runs them: what is printed, what is written, what is refused."""

import io
import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from astraflow.join import parse_join
from astraflow_kit.identity.tokens import read_revoked
from astraflow_kit.parent import python
from support.cli import Ended, run


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An authority, and a key that signs."""
    assert run("ca", "create", f"{tmp_path}").status == 0
    assert run("token", "keys", f"{tmp_path}/signing.pem").status == 0
    return tmp_path


def issue(folder: Path, command: str, *more: str) -> Ended:
    words = (
        ("token", "create") if command == "token" else ("join-token", "--address", "dataflow.example:7070")
    )
    return run(*words, "--key", f"{folder}/signing.pem", *more)


def test_an_authority_says_what_it_wrote_for_people_and_as_json(folder: Path) -> None:
    text = run("ca", "issue", f"{folder}", "dataflow", "--dns", "dataflow.example", "--ip", "10.0.0.5")
    assert f"{folder}/dataflow.pem  certificate for dataflow.example, 10.0.0.5, valid until" in text.output
    written = run("ca", "issue", f"{folder}", "node", "--client", "--json").json
    assert (written["certificate"], written["names"]) == (f"{folder}/node.pem", [])


def test_a_token_is_printed_alone_so_that_it_can_be_piped(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    issued = issue(
        folder, "token", "--role", "trainer", "--run", "math", "--policy", "solver", "--ttl", "12h"
    )
    assert issued.output.count(".") == 2
    assert "expires in 12 h 00 min" in issued.errors or "expires in 11 h 59 min" in issued.errors
    monkeypatch.setattr("sys.stdin", io.StringIO(issued.output))
    said = run("token", "inspect", "--json").json
    assert (said["role"], said["runs"], said["policies"]) == ("trainer", ["math"], ["solver"])
    assert said["jti"] in issued.errors


def test_a_token_in_a_file_is_its_owners_and_never_overwritten(folder: Path) -> None:
    out = folder / "token"
    issued = issue(folder, "token", "--run", "*", "--out", f"{out}")
    assert out.read_text().strip() not in issued.output + issued.errors
    assert out.stat().st_mode & 0o777 == 0o600
    assert "not overwritten" in issue(folder, "token", "--run", "*", "--out", f"{out}").errors


@pytest.mark.parametrize(
    "command", [("token", "create"), ("join-token", "--address", "dataflow.example:7070", "--public-ca")]
)
def test_a_secret_that_a_shell_writes_to_a_file_is_its_owners(folder: Path, command: Sequence[str]) -> None:
    out = folder / "out"
    whole = python("astraflow.cli", *command, "--key", f"{folder}/signing.pem", "--run", "*")
    with out.open("w") as file:
        os.fchmod(file.fileno(), 0o644)
        subprocess.run(whole, stdout=file, stderr=subprocess.DEVNULL, check=True)
    assert out.read_text().strip()
    assert out.stat().st_mode & 0o777 == 0o600


def test_a_join_string_holds_address_authority_and_token(folder: Path) -> None:
    out = folder / "join"
    issued = issue(
        folder, "join", "--ca", f"{folder}/ca.pem", "--run", "math", "--ttl", "30d", "--out", f"{out}"
    )
    assert "expires in 30 days" in issued.errors
    join = parse_join(out.read_text())
    assert (join.address, len(join.ca), join.token.count(".")) == ("dataflow.example:7070", 1, 2)
    shown = run("token", "inspect", f"{out}").output
    assert "sha256" in shown.replace("\n", " ")
    assert "rollout" in shown
    assert join.token not in shown


@pytest.mark.parametrize(
    ("command", "more", "says"),
    [
        ("token", ("--run", "*", "--role", "root"), "roles: rollout, trainer"),
        ("token", (), "--run RUN"),
        ("token", ("--run", "*", "--ttl", "soon"), "30m, 12h or 30d"),
        ("join", ("--run", "*"), "neither ca nor public_ca"),
        ("join", ("--run", "*", "--ca", "nowhere.pem"), "holds no certificates"),
    ],
)
def test_what_cannot_be_issued_ends_with_status_2_and_prints_no_secret(
    folder: Path, command: str, more: tuple[str, ...], says: str
) -> None:
    refused = issue(folder, command, *more)
    assert (refused.status, refused.output) == (2, "")
    assert says in refused.errors


def test_a_token_is_revoked_in_a_file_once(folder: Path) -> None:
    issue(folder, "token", "--run", "*", "--out", f"{folder}/token")
    listed = folder / "revoked"
    for words in ((f"{folder}/token",), (f"{folder}/token",), ("--id", "another")):
        assert run("token", "revoke", *words, "--revoked-tokens-file", f"{listed}").status == 0
    first = run("token", "inspect", f"{folder}/token", "--json").json["jti"]
    assert read_revoked(listed.read_text()) == {first, "another"}
    assert listed.read_text().count(first) == 1


def test_what_is_no_token_is_not_repeated(folder: Path) -> None:
    (folder / "secret").write_text("s3cret")
    refused = run("token", "inspect", f"{folder}/secret")
    assert refused.status == 2
    assert "s3cret" not in refused.errors + refused.output
    assert json.loads((folder / "signing.jwks.json").read_text())["keys"]
