"""Settings of a trainer: only `join` is required, wrong ones are named, folders are resolved."""

import os
from pathlib import Path

import pytest

from astraflow_kit.settings import SettingsError, load
from astraflow_trainer.settings import RankSettings, TrainerSettings, load_rank_settings


def test_an_address_is_all_it_takes() -> None:
    settings = load(TrainerSettings, {"join": "127.0.0.1:7070"})
    assert (settings.run_id, settings.policy, settings.threads) == ("", None, 1)
    assert settings.work_dir == Path.home() / ".cache/astraflow/trainer"
    assert not settings.allow_recipe_code


@pytest.mark.parametrize("address", ["127.0.0.1:7070", "dataflow.example:1", "[::1]:7070"])
def test_an_address_is_a_host_and_a_port(address: str) -> None:
    assert load(TrainerSettings, {"join": address}).join == address


WRONG_SETTINGS = [
    ({}, "JOIN"),
    ({"join": "nowhere"}, "join"),
    ({"join": "http://h:1"}, "join"),
    ({"join": "::1:7070"}, "join"),
    ({"join": "h:1", "threads": 0}, "threads"),
    ({"join": "h:1", "warm_start_threads": -1}, "warm_start_threads"),
    ({"join": "h:1", "drain_timeout_s": 0}, "drain_timeout_s"),
    ({"join": "h:1", "polcy": "solver"}, "policy"),
    ({"join": "h:1", "learning_rate": 0.1}, "unknown setting 'learning_rate'"),
    ({"join": "h:1", "host": "0.0.0.0"}, "TLS"),
]


@pytest.mark.parametrize(("options", "complaint"), WRONG_SETTINGS)
def test_wrong_settings_are_refused_by_name(options: dict[str, object], complaint: str) -> None:
    with pytest.raises(SettingsError, match=complaint):
        load(TrainerSettings, options)


def test_settings_come_from_variables_where_no_option_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASTRAFLOW_JOIN", "h:1")
    monkeypatch.setenv("ASTRAFLOW_POLICY", "critic")
    settings = load(TrainerSettings, {"policy": "solver", "run_id": None})
    assert (settings.join, settings.policy) == ("h:1", "solver")


def test_warm_starts_lie_in_the_work_folder_unless_runs_share_them(tmp_path: Path) -> None:
    own = load(TrainerSettings, {"join": "h:1", "work_dir": tmp_path})
    assert own.cache == tmp_path / "cache"
    assert load(TrainerSettings, {"join": "h:1", "cache_dir": "~/models"}).cache == Path.home() / "models"


def test_a_warm_start_takes_every_core_it_may_use_unless_told() -> None:
    assert load(TrainerSettings, {"join": "h:1"}).warm_start_cores == len(os.sched_getaffinity(0))
    assert load(TrainerSettings, {"join": "h:1", "warm_start_threads": 3}).warm_start_cores == 3


@pytest.fixture(autouse=True)
def no_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in RankSettings.model_fields:
        monkeypatch.delenv(name.upper(), raising=False)


def test_without_torchruns_variables_there_is_one_rank() -> None:
    settings = load_rank_settings()
    assert (settings.rank, settings.world_size) == (0, 1)


def test_torchruns_variables_say_which_rank_this_is(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    for name, value in (given | {"TORCHELASTIC_RESTART_COUNT": "3", "LOCAL_RANK": "1"}).items():
        monkeypatch.setenv(name, value)
    settings = load_rank_settings()
    assert (settings.rank, settings.world_size, settings.master_port) == (1, 2, 29500)
    assert settings.torchelastic_restart_count == 3


NO_RANKS = [
    ({"RANK": "2", "WORLD_SIZE": "2", "MASTER_PORT": "1"}, "RANK 2 must be below WORLD_SIZE 2"),
    ({"RANK": "0", "WORLD_SIZE": "2"}, "WORLD_SIZE 2 needs MASTER_PORT"),
    ({"WORLD_SIZE": "none"}, "WORLD_SIZE"),
]


@pytest.mark.parametrize(("variables", "complaint"), NO_RANKS)
def test_variables_that_make_no_rank_are_refused(
    variables: dict[str, str], complaint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SettingsError, match=complaint):
        load_rank_settings()
