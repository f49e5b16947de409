"""The metrics of a process."""

import pytest

from astraflow_kit.metric_schema import Kind, Metric
from astraflow_kit.metrics import MAX_SERIES, OVERFLOW, Metrics

SCHEMA = {
    entry.name: entry
    for entry in (
        Metric("astraflow_drops_total", Kind.COUNTER, "Dropped.", ("reason",)),
        Metric("astraflow_ready", Kind.GAUGE, "Ready."),
        Metric("astraflow_waits", Kind.GAUGE, "Waits.", ("run", "reason")),
        Metric("astraflow_wait_seconds", Kind.HISTOGRAM, "Waits.", buckets=(0.1, 1.0)),
    )
}


def test_each_kind_is_rendered() -> None:
    metrics = Metrics(SCHEMA)
    metrics.increment("astraflow_drops_total", 2, reason="stale")
    metrics.set("astraflow_ready", 5)
    metrics.add("astraflow_ready", -1)
    metrics.observe("astraflow_wait_seconds", 0.5)
    text = metrics.render().decode()
    assert 'astraflow_drops_total{reason="stale"} 2.0' in text
    assert "astraflow_ready 4.0" in text
    assert 'astraflow_wait_seconds_bucket{le="0.1"} 0.0' in text
    assert 'astraflow_wait_seconds_bucket{le="1.0"} 1.0' in text
    assert "process_resident_memory_bytes" in text


def test_two_processes_worth_of_metrics_do_not_mix() -> None:
    one, other = Metrics(SCHEMA), Metrics(SCHEMA)
    one.set("astraflow_ready", 1)
    assert "astraflow_ready 0.0" in other.render().decode()


def test_an_undeclared_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(KeyError, match="Did you mean 'astraflow_ready'"):
        Metrics(SCHEMA).set("astraflow_redy", 1)


def test_a_counter_is_not_a_gauge() -> None:
    with pytest.raises(KeyError, match="not declared as this kind"):
        Metrics(SCHEMA).set("astraflow_drops_total", 1, reason="stale")


@pytest.mark.parametrize("labels", [{}, {"why": "x"}, {"reason": "x", "more": "y"}])
def test_wrong_labels_are_refused(labels: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="has labels"):
        Metrics(SCHEMA).increment("astraflow_drops_total", 1.0, **labels)


def test_an_unbounded_label_overflows_into_one_series() -> None:
    metrics = Metrics(SCHEMA)
    for number in range(MAX_SERIES + 50):
        metrics.increment("astraflow_drops_total", reason=f"r{number}")
    metrics.increment("astraflow_drops_total", reason="r0")
    text = metrics.render().decode()
    assert text.count("astraflow_drops_total{") == MAX_SERIES + 1
    assert f'reason="{OVERFLOW}"}} 50.0' in text
    assert 'reason="r0"} 2.0' in text


def series(metrics: Metrics, name: str) -> dict[str, float]:
    lines = (
        line.rsplit(" ", 1) for line in metrics.render().decode().splitlines() if line.startswith(f"{name}{{")
    )
    return {labels.removeprefix(name): float(value) for labels, value in lines}


def test_what_is_over_leaves_the_page() -> None:
    metrics = Metrics(SCHEMA)
    metrics.replace("astraflow_waits", {("groups",): 3.0, ("node",): 1.0}, run="a")
    metrics.replace("astraflow_waits", {("groups",): 7.0}, run="b")
    metrics.replace("astraflow_waits", {("node",): 2.0}, run="a")
    assert series(metrics, "astraflow_waits") == {
        '{reason="groups",run="b"}': 7.0,
        '{reason="node",run="a"}': 2.0,
    }


def test_a_run_that_is_forgotten_makes_room_for_another() -> None:
    metrics = Metrics(SCHEMA)
    metrics.increment("astraflow_drops_total", reason="stale")
    for number in range(MAX_SERIES + 50):
        metrics.set("astraflow_waits", 1.0, run=f"r{number}", reason="node")
        metrics.forget(run=f"r{number}")
    assert series(metrics, "astraflow_waits") == {}
    assert series(metrics, "astraflow_drops_total") == {'{reason="stale"}': 1.0}
