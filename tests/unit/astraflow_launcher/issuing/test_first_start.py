"""The secrets of an installation are made once, are renewed before they end, and each party gets its own only."""

import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509

from astraflow_kit.identity.keys import read_keys
from astraflow_kit.identity.tokens import nodes_said_by, verify
from astraflow_launcher.issuing.first_start import make_missing

NOW = datetime(2026, 11, 22, tzinfo=UTC)
NAMES = ("dataflow", "raas")


def make(folder: Path, *, days: int = 0, names: tuple[str, ...] = NAMES) -> list[str]:
    return list(make_missing(folder, names=names, now=NOW + timedelta(days=days)))


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_second_start_changes_nothing(tmp_path: Path) -> None:
    assert make(tmp_path)
    first = contents(tmp_path)
    assert make(tmp_path, days=30) == []
    assert contents(tmp_path) == first


def test_tokens_have_the_role_of_their_party_and_the_servers_know_their_key(tmp_path: Path) -> None:
    make(tmp_path)
    keys = read_keys((tmp_path / "dataflow" / "token-keys.json").read_bytes(), where="keys")
    found = {
        party: verify(
            (tmp_path / party / "token").read_text().strip(),
            keys=keys,
            audience="astraflow",
            now_s=NOW.timestamp(),
        ).roles
        for party in ("trainer", "raas", "operator", "observe")
    }
    assert found == {
        "trainer": {"trainer"},
        "raas": {"rollout"},
        "operator": {"operator"},
        "observe": {"viewer"},
    }


def test_nodes_are_called_by_the_host_name_that_they_have_in_common(tmp_path: Path) -> None:
    make(tmp_path)
    assert nodes_said_by((tmp_path / "raas" / "token").read_text().strip()) == ("node-*",)


def test_what_signs_stays_with_the_authority_and_secrets_are_not_readable_by_others(tmp_path: Path) -> None:
    make(tmp_path)
    signing = (tmp_path / "authority" / "signing.key").read_bytes()
    authority = (tmp_path / "authority" / "ca.key").read_bytes()
    held = {name for name, content in contents(tmp_path).items() if content in (signing, authority)}
    assert held == {"authority/signing.key", "authority/ca.key"}
    public = {"ca.pem", "ca.crt", "server.pem", "tls.crt", "signing.jwks.json", "token-keys.json"}
    open_to_others = {
        path.name for path in tmp_path.rglob("*") if path.is_file() and path.stat().st_mode & stat.S_IROTH
    }
    assert open_to_others == public


def test_what_ends_soon_is_made_anew_and_the_authority_stays(tmp_path: Path) -> None:
    make(tmp_path)
    first = contents(tmp_path)
    made = " ".join(make(tmp_path, days=330))
    assert ("a certificate" in made, made.count("a token"), "authority" in made) == (True, 4, False)
    then = contents(tmp_path)
    assert then["authority/ca.pem"] == first["authority/ca.pem"]
    assert then["dataflow/tls.crt"] == then["authority/server.pem"] != first["dataflow/tls.crt"]


def test_a_name_that_the_certificate_lacks_makes_a_new_one(tmp_path: Path) -> None:
    make(tmp_path)
    assert len(make(tmp_path, names=(*NAMES, "trainer"))) == 1
    certificate = x509.load_pem_x509_certificate((tmp_path / "trainer" / "tls.crt").read_bytes())
    shown = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert set(shown.get_values_for_type(x509.DNSName)) == {*NAMES, "trainer", "localhost"}


def test_valkey_and_its_caller_know_one_password(tmp_path: Path) -> None:
    make(tmp_path)
    password = (tmp_path / "dataflow" / "valkey-password").read_text().strip()
    assert (tmp_path / "valkey" / "valkey.conf").read_text() == f"requirepass {password}\n"
    assert len(password) > 40
