"""Settings of the engine and the sizes that follow from them."""

from pathlib import Path

import pytest

from astraflow_engine import assembly, core, errors, model_config
from astraflow_engine.settings import EngineSettings
from astraflow_kit.settings import SettingsError, load
from support.tiny_models import TinyShape, save_tiny_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_tiny_model(tmp_path / "model", shape=TinyShape(max_positions=8_192))


def settings(folder: Path, **options: object) -> EngineSettings:
    return load(EngineSettings, {"model_path": folder, **options})


def limits(folder: Path, **options: object) -> core.CoreLimits:
    return assembly.core_limits(settings(folder, **options), model_config.load_model_config(folder))


def test_the_context_length_defaults_to_the_model_s_up_to_a_bound(folder: Path) -> None:
    assert limits(folder).capacity == 4_096
    assert limits(folder, context_length=8_000).capacity == 8_000


def test_a_context_beyond_the_model_s_positions_is_refused(folder: Path) -> None:
    with pytest.raises(errors.ModelError, match=r"context_length is 9000, .* was made for 8192 positions"):
        limits(folder, context_length=9_000)


def test_a_cache_beyond_the_machine_s_memory_is_refused(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "long", shape=TinyShape(max_positions=2**22))
    with pytest.raises(errors.ModelError, match="lower --max-running-requests or --context-length"):
        limits(folder, context_length=2**22, max_running_requests=1_024)


def test_cache_bytes_are_those_that_are_allocated(folder: Path) -> None:
    small = limits(folder, context_length=100, max_running_requests=3)
    # keys and values, 2 layers, 3 slots, 2 kv heads, 101 columns, 8 numbers of 4 bytes
    assert small.cache_bytes(model_config.load_model_config(folder)) == 2 * 2 * 3 * 2 * 101 * 8 * 4


@pytest.mark.parametrize(
    ("option", "value"), [("max_running_requests", 0), ("port", 70_000), ("request_timeout_s", 0)]
)
def test_a_setting_out_of_bounds_is_refused_by_name(folder: Path, option: str, value: object) -> None:
    with pytest.raises(SettingsError, match=f"option {option} = {value}"):
        settings(folder, **{option: value})


def test_a_reachable_address_needs_consent(folder: Path) -> None:
    with pytest.raises(SettingsError, match="reachable from other machines"):
        settings(folder, host="0.0.0.0")
    assert settings(folder, host="0.0.0.0", insecure=True).host == "0.0.0.0"
