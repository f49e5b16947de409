"""Settings: read once, refused with the remedy, safe addresses only."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from astraflow.connecting.connection import is_loopback
from astraflow.errors import AstraflowError
from astraflow_kit.join_settings import JoinSettings
from astraflow_kit.settings import DaemonSettings, SettingsError, environment_of, load, read_secret


class Example(DaemonSettings):
    """A daemon's own settings."""

    redis_url: str = "redis://127.0.0.1:6379"
    max_staleness: int = 1


@pytest.fixture
def tls(tmp_path: Path) -> dict[str, object]:
    paths = {name: tmp_path / name for name in ("tls_cert_file", "tls_key_file", "token_keys_file")}
    for path in paths.values():
        path.write_text("x")
    return dict(paths)


def test_options_win_over_the_environment_and_that_over_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASTRAFLOW_GRPC_PORT", "7070")
    monkeypatch.setenv("ASTRAFLOW_MAX_STALENESS", "4")
    settings = load(Example, {"max_staleness": 2, "http_port": None})
    assert (settings.grpc_port, settings.max_staleness, settings.http_port) == (7070, 2, 0)


def test_an_empty_variable_counts_as_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASTRAFLOW_TOKEN_KEYS_FILE", "")
    assert load(Example).token_keys_file is None


def test_settings_cannot_be_changed() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        load(Example).host = "0.0.0.0"


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"redis_ulr": "x"}, "unknown setting 'redis_ulr'. Did you mean 'redis_url'"),
        ({"grpc_port": 70_000}, "option grpc_port = 70000: .*65535"),
        ({"log_level": "loud"}, "option log_level = 'loud'"),
        ({"failpoints": "trainer.nowhere=kill"}, "unknown failpoint 'trainer.nowhere'"),
        ({"token_keys_file": "/no/such/file"}, "option token_keys_file"),
        ({"grpc_port": -1, "http_port": -1}, "grpc_port = -1: .*; option http_port = -1: "),
    ],
)
def test_a_wrong_option_is_refused_with_its_value(options: dict[str, object], complaint: str) -> None:
    with pytest.raises(SettingsError, match=complaint) as caught:
        load(Example, options)
    assert isinstance(caught.value, AstraflowError)


def test_a_wrong_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASTRAFLOW_MAX_STALENESS", "few")
    with pytest.raises(SettingsError, match="ASTRAFLOW_MAX_STALENESS = 'few'"):
        load(Example)


def test_what_a_command_calls_the_server_with_is_no_misspelling(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in JoinSettings.model_fields.keys() - DaemonSettings.model_fields.keys():
        monkeypatch.setenv(f"ASTRAFLOW_{name.upper()}", "x")
    load(Example)


def test_a_misspelt_variable_is_refused_and_another_daemons_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASTRAFLOW_LEARNING_RATE", "3")
    monkeypatch.setenv("ASTRAFLOW_TOKEN_FILE", "of whoever dials this daemon; close to token_keys_file")
    monkeypatch.setenv("ASTRAFLOW_RANK_TIMEOUT_S", "a trainer's; close to drain_timeout_s")
    load(Example)
    monkeypatch.setenv("ASTRAFLOW_FAILPOINT", "x=kill")
    with pytest.raises(SettingsError, match=r"ASTRAFLOW_FAILPOINT is not a setting.*ASTRAFLOW_FAILPOINTS"):
        load(Example)


def test_another_process_can_have_the_same_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    given = load(Example, {"grpc_port": 7070, "http_allowed_hosts": ["a", "b"], "log_format": "json"})
    monkeypatch.setenv("ASTRAFLOW_LOG_LEVEL", "debug")
    for name, value in environment_of(given).items():
        monkeypatch.setenv(name, value)
    assert "ASTRAFLOW_LOG_LEVEL" not in environment_of(given)
    monkeypatch.delenv("ASTRAFLOW_LOG_LEVEL")
    assert load(Example) == given


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
def test_loopback_needs_no_protection(host: str) -> None:
    assert is_loopback(host)
    load(Example, {"host": host, "http_host": host})


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "gpu-7.example.org"])
def test_a_reachable_address_needs_tls_and_tokens_or_a_clear_word(
    host: str, tls: dict[str, object], tmp_path: Path
) -> None:
    some = {key: value for key, value in tls.items() if key != "token_keys_file"}
    for options in ({}, some):
        with pytest.raises(SettingsError, match=r"token_keys_file, or bind 127\.0\.0\.1, or accept"):
            load(Example, {"host": host, **options})
    assert load(Example, {"host": host, **tls}).host == host
    assert load(Example, {"host": host, "insecure": True}).host == host


def test_pages_on_a_reachable_address_need_their_own_word() -> None:
    with pytest.raises(SettingsError, match="insecure_http"):
        load(Example, {"http_host": "0.0.0.0", "insecure": True})
    load(Example, {"http_host": "0.0.0.0", "insecure_http": True})


def test_tls_and_tokens_protect_the_pages_too(tls: dict[str, object]) -> None:
    assert load(Example, {"http_host": "0.0.0.0", **tls}).http_host == "0.0.0.0"


@pytest.mark.parametrize(
    ("given", "needs"),
    [("tls_client_ca_file", "tls_cert_file"), ("revoked_tokens_file", "token_keys_file")],
)
def test_a_file_that_would_do_nothing_alone_is_refused(tmp_path: Path, given: str, needs: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SettingsError, match=f"{given} needs {needs}"):
        load(Example, {given: tmp_path / "file"})


def test_a_certificate_without_its_key_is_refused(tls: dict[str, object]) -> None:
    with pytest.raises(SettingsError, match="go together"):
        load(Example, {"tls_cert_file": tls["tls_cert_file"]})


def test_a_secret_is_read_without_its_newline_each_time(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("one\n")
    assert read_secret(path) == "one"
    path.write_text("two\n")
    assert read_secret(path) == "two"


@pytest.mark.parametrize("content", [None, "", "\n"])
def test_a_missing_or_empty_secret_is_refused(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "token"
    if content is not None:
        path.write_text(content)
    with pytest.raises(SettingsError, match=str(path)):
        read_secret(path)
