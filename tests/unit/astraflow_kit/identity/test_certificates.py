"""A pair that could not be shown is refused at start, with the remedy."""

import time
from datetime import timedelta
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from astraflow_kit.identity.certificates import ServerCertificate, client_certificate_end
from astraflow_kit.join_settings import JoinSettings
from astraflow_kit.settings import DaemonSettings, SettingsError
from support.certificates import self_signed


def made(folder: Path, **changed: Path) -> ServerCertificate:
    """The certificate of these files."""
    return ServerCertificate(DaemonSettings(**(self_signed(folder) | changed)))  # type: ignore[arg-type]


def test_a_pair_says_how_long_it_is_valid(tmp_path: Path) -> None:
    assert 86_000 < made(tmp_path).remaining_s() <= 86_400


def test_a_pair_of_two_pairs_is_refused(tmp_path: Path) -> None:
    (other := tmp_path / "other").mkdir()
    with pytest.raises(SettingsError, match=r"key\.pem does not belong to tls_cert_file .*cert\.pem"):
        made(tmp_path, tls_key_file=self_signed(other)["tls_key_file"])


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"valid": timedelta(seconds=-1)}, r"cert\.pem expired at 20.*this server's clock says"),
        ({"key": Ed25519PrivateKey.generate()}, r"key\.pem is an Edwards-curve key"),
    ],
)
def test_a_pair_that_no_client_would_accept_is_refused(
    tmp_path: Path, settings: dict[str, object], complaint: str
) -> None:
    with pytest.raises(SettingsError, match=complaint):
        ServerCertificate(DaemonSettings(**self_signed(tmp_path, **settings)))  # type: ignore[arg-type]


@pytest.mark.parametrize("setting", ["tls_cert_file", "tls_key_file", "tls_client_ca_file"])
def test_a_file_that_holds_something_else_is_named(tmp_path: Path, setting: str) -> None:
    (wrong := tmp_path / "wrong.pem").write_text("not PEM")
    with pytest.raises(SettingsError, match=rf"{setting} .*wrong\.pem"):
        made(tmp_path, **{setting: wrong})


def test_a_renewed_pair_replaces_the_old_one_and_a_broken_one_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("astraflow_kit.identity.watched.LOOK_EVERY_S", 0.0)
    certificate = made(tmp_path)
    first = certificate.current()
    self_signed(tmp_path)
    assert certificate.current() != (first)
    second = certificate.current()
    (tmp_path / "key.pem").write_text("torn")
    assert certificate.current() == second


def test_a_daemon_knows_when_the_certificate_ends_that_it_shows_to_servers(tmp_path: Path) -> None:
    pair = self_signed(tmp_path)
    shown = {"client_cert_file": pair["tls_cert_file"], "client_key_file": pair["tls_key_file"]}
    watched = client_certificate_end(JoinSettings(join="server:7070", public_ca=True, **shown))  # type: ignore[arg-type]
    assert watched is not None
    assert 86_000 < watched.current() - time.time() <= 86_400
    assert client_certificate_end(JoinSettings(join="server:7070", public_ca=True)) is None
