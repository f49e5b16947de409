"""The benchmark of change detection counts what was changed, in ratios of the same device."""

import pytest

from astraflow_bench.weights.detection import measure_detection


def test_what_is_reported_is_a_ratio_of_times_on_the_same_tensors() -> None:
    report = measure_detection(num_elements=20_001, density=0.02, device="cpu", repeats=1, seed=3)
    assert report.num_elements == 20_000
    assert report.density == pytest.approx(0.02, rel=0.05)
    assert report.bytes_to_host == round(6 * report.density * report.num_elements)
    assert report.over_read == pytest.approx(report.detect_s / report.read_both_s)


def test_a_model_in_which_nothing_changed_sends_nothing() -> None:
    report = measure_detection(num_elements=4096, density=0.0, device="cpu", repeats=1, seed=0)
    assert (report.density, report.bytes_to_host) == (0.0, 0)


def test_a_gpu_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ValueError, match="no CUDA device"):
        measure_detection(num_elements=4096, density=0.0, device="cuda", repeats=1, seed=0)
