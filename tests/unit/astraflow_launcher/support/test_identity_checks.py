"""What `astraflow doctor` says of certificates, tokens and join strings, by the clock."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from astraflow.join import JoinString, format_join
from astraflow_launcher.issuing.authority import create_authority, issue_certificate
from astraflow_launcher.issuing.keys import create_keys
from astraflow_launcher.issuing.tokens import Grant, issue_token, read_authorities
from astraflow_launcher.support.checks import State
from astraflow_launcher.support.identity_checks import check_certificate_file, check_token_file
from support.cli import run

NOW = datetime.now(UTC)
DAY = timedelta(days=1)
ROWS = [
    (timedelta(), State.OK, "is valid until"),
    (27 * DAY, State.WARNING, "is valid until"),
    (31 * DAY, State.FAILED, "expired on"),
    (timedelta(hours=-1), State.FAILED, "is valid only in"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An authority for 400 days; a certificate, a token and a join string for 30."""
    folder = tmp_path_factory.mktemp("identity")
    create_authority(folder, days=400, now=NOW - DAY)
    issue_certificate(folder, "server", dns=["h"], days=30, now=NOW)
    create_keys(folder / "signing.pem")
    token = issue_token(Grant(role="rollout", runs=("*",)), ttl=30 * DAY, key=folder / "signing.pem", now=NOW)
    (folder / "token").write_text(token)
    join = JoinString(address="h:1", ca=read_authorities(folder / "ca.pem"), token=token)
    (folder / "join").write_text(format_join(join))
    return folder


@pytest.mark.parametrize(("later", "state", "says"), ROWS)
def test_a_certificate_that_ends_soon_or_is_not_valid_is_named(
    folder: Path, later: timedelta, state: State, says: str
) -> None:
    (finding,) = check_certificate_file(folder / "server.pem", now=NOW + later)
    assert (finding.state, says in finding.found) == (state, True), finding


@pytest.mark.parametrize(
    ("later", "state", "says"), [*ROWS[:1], (29.5 * DAY, State.WARNING, "is valid until"), *ROWS[2:]]
)
def test_so_is_a_token_and_one_in_a_join_string_with_its_authorities(
    folder: Path, later: timedelta, state: State, says: str
) -> None:
    (finding,) = check_token_file(folder / "token", now=NOW + later)
    authority, token = check_token_file(folder / "join", now=NOW + later)
    assert (authority.check, authority.state) == ("certificate", State.OK)
    assert finding.state == token.state == state
    assert says in finding.found


def test_the_doctor_fails_for_a_file_that_proves_nothing_and_does_not_repeat_it(folder: Path) -> None:
    (folder / "none").write_text("s3cret")
    examined = run("doctor", "--json", "--token", f"{folder}/none", "--certificate", f"{folder}/none")
    failed = [row for row in examined.json if row["check"] in ("token", "certificate")]
    assert (examined.status, [row["state"] for row in failed]) == (1, ["failed", "failed"])
    assert "s3cret" not in examined.output
