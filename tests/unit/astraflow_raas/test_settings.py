"""Settings of a node: only `join` is required, wrong ones are named, and an engine inherits none of them."""

from pathlib import Path

import pytest

from astraflow.errors import InvalidArgumentError
from astraflow_kit.settings import SettingsError, load
from astraflow_raas.settings import NodeSettings, child_environment


def test_an_address_is_all_it_takes() -> None:
    settings = load(NodeSettings, {"join": "127.0.0.1:7070"})
    assert settings.engine == "cpu"
    assert settings.work_dir == Path.home() / ".cache/astraflow/raas"


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({}, "JOIN"),
        ({"join": "nowhere"}, "join"),
        ({"join": "h:1", "engine": "vllm"}, "`cpu`"),
        ({"join": "h:1", "node_id": "a b"}, "node_id"),
        ({"join": "h:1", "serve": "solver"}, "serve"),
        ({"join": "h:1", "serve": "solver=0"}, "1 to 64 engines"),
        ({"join": "h:1", "serve": "solver=1,solver=2"}, "name a policy once"),
        ({"join": "h:1", "max_concurrent_taks": 3}, "max_concurrent_tasks"),
        ({"join": "h:1", "host": "0.0.0.0"}, "TLS"),
    ],
)
def test_wrong_settings_are_refused_by_name(options: dict[str, object], complaint: str) -> None:
    with pytest.raises(SettingsError, match=complaint):
        load(NodeSettings, options)


def test_an_engine_may_be_an_address() -> None:
    settings = load(NodeSettings, {"join": "h:1", "engine": "http://10.0.0.1:30000/"})
    assert settings.engine == "http://10.0.0.1:30000"


def test_a_policy_has_one_engine_unless_it_is_told_otherwise() -> None:
    settings = load(NodeSettings, {"join": "h:1", "serve": "solver=2"})
    assert settings.engines_of(("solver", "verifier")) == {"solver": 2, "verifier": 1}
    with pytest.raises(InvalidArgumentError, match="no policy 'solver'"):
        settings.engines_of(("judge", "solvers"))
    remote = load(NodeSettings, {"join": "h:1", "serve": "solver=2", "engine": "http://10.0.0.1:30000"})
    with pytest.raises(InvalidArgumentError, match="engines that the node starts itself"):
        remote.engines_of(("solver",))


def test_an_engine_inherits_failpoints_and_log_settings_only(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ADDRESS_FILE", "GRPC_PORT", "JOIN", "FAILPOINTS", "FAILPOINTS_LOG", "LOG_LEVEL"):
        monkeypatch.setenv(f"ASTRAFLOW_{name}", "x")
    ours = {name for name in child_environment() if name.startswith("ASTRAFLOW_")}
    assert ours == {"ASTRAFLOW_FAILPOINTS", "ASTRAFLOW_FAILPOINTS_LOG", "ASTRAFLOW_LOG_LEVEL"}
    assert "PATH" in child_environment()


def test_what_agents_must_not_read_is_every_file_that_the_node_acts_by(tmp_path: Path) -> None:
    key, token = tmp_path / "key", tmp_path / "token"
    token.write_text("t")
    settings = NodeSettings(
        join="127.0.0.1:7070",
        work_dir=tmp_path / "work",
        token_file=token,
        external_key_file=(f"judge={key}",),
    )
    assert settings.secret_paths == (tmp_path / "work", token, key)
