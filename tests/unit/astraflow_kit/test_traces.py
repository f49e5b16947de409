"""Spans, received by a real collector: their ids, what joins them across processes, and what a bad collector costs."""

import asyncio
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from astraflow.client import AsyncClient
from astraflow_bench.traces import Collector
from astraflow_kit import traces
from astraflow_kit.settings import DaemonSettings, ProcessSettings, SettingsError, load
from support.development import wait_for
from support.otlp import attributes, named, traced

HEADER = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as started:
        yield started


def test_a_task_has_the_same_trace_in_every_daemon_and_run_and_task_decide_it(
    monkeypatch: pytest.MonkeyPatch, collector: Collector
) -> None:
    with traced(monkeypatch, collector):
        first, again = traces.task("a" * 32, "train-1"), traces.task("a" * 32, "train-1")
        others = [traces.task("b" * 32, "train-1"), traces.task("a" * 32, "train-2")]
        episode = traces.episode("a" * 32, "train-1", "x.0")
        assert first == again
        assert first is not None
        assert episode is not None
        assert len({place.trace_id for place in [first, *others] if place}) == 3
        assert (episode.trace_id, episode.trace_flags.sampled) == (first.trace_id, True)
        assert episode.span_id != first.span_id


def test_spans_are_below_what_they_run_in_and_have_the_ids_that_were_computed(
    monkeypatch: pytest.MonkeyPatch, collector: Collector
) -> None:
    with traced(monkeypatch, collector):
        root = traces.task("a" * 32, "train-1")
        assert root is not None
        with traces.span("task", at=root), traces.span("episode", {"n": 1}) as inner:
            inner.set_attributes({"words": ("a", "b")})
            here = traces.here()
        traces.record("push", began_s=12.5, under=here, attributes={}, links=[root])
    wait_for(lambda: len(collector.received) == 3)
    (task,), (episode,), (push,) = (named(collector.received, name) for name in ("task", "episode", "push"))
    assert (int.from_bytes(task.trace_id), int.from_bytes(task.span_id)) == (root.trace_id, root.span_id)
    assert (task.parent_span_id, episode.parent_span_id) == (b"", task.span_id)
    assert {span.trace_id for span in (task, episode, push)} == {task.trace_id}
    assert (push.parent_span_id, push.start_time_unix_nano) == (episode.span_id, 12_500_000_000)
    assert [link.span_id for link in push.links] == [task.span_id]
    assert attributes(episode) == {"n": 1, "words": ("a", "b")}
    assert {one.service for one in collector.received} == {"astraflow-test"}


def test_what_is_raised_inside_is_named_and_not_told(
    monkeypatch: pytest.MonkeyPatch, collector: Collector
) -> None:
    with traced(monkeypatch, collector), pytest.raises(ValueError, match="the secret"), traces.span("push"):
        raise ValueError("the secret is 42")
    wait_for(lambda: collector.received)
    (span,) = named(collector.received, "push")
    assert (attributes(span), span.status.code) == (
        {"error.type": "ValueError"},
        span.status.STATUS_CODE_ERROR,
    )
    assert b"secret" not in span.SerializeToString()


@pytest.mark.parametrize(
    ("sampler", "least", "most"),
    [
        ({"OTEL_TRACES_SAMPLER": ""}, 5, 45),
        ({"OTEL_TRACES_SAMPLER": "parentbased_traceidratio", "OTEL_TRACES_SAMPLER_ARG": "0.5"}, 60, 140),
    ],
    ids=["a tenth unless told", "as told"],
)
def test_a_share_of_tasks_is_the_same_share_in_every_daemon(
    monkeypatch: pytest.MonkeyPatch, collector: Collector, sampler: dict[str, str], least: int, most: int
) -> None:
    with traced(monkeypatch, collector, **sampler):
        places = [traces.task("a" * 32, f"train-{number}") for number in range(200)]
        kept = [place for place in places if place and place.trace_flags.sampled]
        assert least < len(kept) < most
        for place in places:
            with (
                traces.span("task", at=place),
                traces.span("chat") as inner,
                traces.served("/A/B", traces.header()),
            ):
                assert inner.is_recording() == (place in kept)
            traces.record("push", began_s=1.0, under=place, attributes={})
    wait_for(lambda: len(collector.received) >= 4 * len(kept))
    received = [int.from_bytes(one.span.trace_id) for one in collector.received]
    assert sorted(received) == sorted([place.trace_id for place in kept] * 4)


def test_every_step_is_recorded_unless_told_otherwise(
    monkeypatch: pytest.MonkeyPatch, collector: Collector
) -> None:
    with traced(monkeypatch, collector, OTEL_TRACES_SAMPLER=""):
        for _ in range(40):
            with traces.span("step"), traces.span("train"):
                pass
    wait_for(lambda: len(collector.received) == 80)


def test_a_call_carries_the_span_it_is_made_in_and_none_outside(
    monkeypatch: pytest.MonkeyPatch, collector: Collector
) -> None:
    async def metadata() -> tuple[dict[str, str], dict[str, str]]:
        async with AsyncClient("127.0.0.1:1") as client:
            with traces.span("step"):
                return dict(client._metadata()), {"traceparent": traces.header()}

    with traced(monkeypatch, collector):
        inside, here = asyncio.run(metadata())
    assert inside == here
    assert asyncio.run(metadata()) == ({}, {"traceparent": ""})


def test_a_served_call_is_recorded_below_its_caller_and_only_where_the_caller_says_so(
    monkeypatch: pytest.MonkeyPatch, collector: Collector
) -> None:
    with traced(monkeypatch, collector):
        for header in (HEADER, "", "nonsense", HEADER.replace("00-4", "ff-4")):
            with traces.served("/astraflow.v1.Echo/Say", header):
                pass
    wait_for(lambda: collector.received)
    (one,) = collector.received
    assert (one.span.name, one.span.parent_span_id.hex()) == ("astraflow.v1.Echo/Say", "00f067aa0ba902b7")


@pytest.mark.parametrize(
    "header", ["", "00", HEADER[:-1], HEADER.upper(), HEADER.replace("00f067aa0ba902b7", "0" * 16)]
)
def test_a_header_that_is_none_is_passed_over(
    monkeypatch: pytest.MonkeyPatch, collector: Collector, header: str
) -> None:
    with traced(monkeypatch, collector):
        assert traces.place_of(header) is None


def test_a_collector_that_hangs_holds_up_neither_spans_nor_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, may_answer = threading.Event(), threading.Event()

    def hang() -> None:
        asked.set()
        may_answer.wait()

    with Collector(answer=hang) as collector:
        with traced(
            monkeypatch, collector, OTEL_BSP_MAX_QUEUE_SIZE="64", OTEL_BSP_MAX_EXPORT_BATCH_SIZE="16"
        ):
            for _ in range(10_000):
                with traces.span("chat"):
                    pass
            assert asked.wait(60)
        # The block has ended, and nothing has been answered: the bounded queue dropped what it could not hold.
        assert not may_answer.is_set()
        assert not collector.received
        assert traces.here() is None
        may_answer.set()


def test_without_a_collector_and_without_traces_blocks_just_run(monkeypatch: pytest.MonkeyPatch) -> None:
    with Collector() as gone:
        pass
    with traced(monkeypatch, gone), traces.span("step"):
        pass
    with traces.span("step") as recorded:
        recorded.set_attributes({"a": 1})
        assert not recorded.is_recording()
    assert (
        traces.task("a", "b")
        is traces.episode("a", "b", "c")
        is traces.here()
        is traces.place_of(HEADER)
        is None
    )


def test_a_process_without_traces_loads_nothing_of_opentelemetry() -> None:
    code = (
        "import sys; from astraflow_kit import serve, traces\n"
        "with traces.span('step'): pass\n"
        "assert not [name for name in sys.modules if name.startswith('opentelemetry')]"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_what_is_missing_or_unknown_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json")
    with pytest.raises(SettingsError, match=r"http/json.* is not known; use one of grpc, http/protobuf"):
        traces.begin("test")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.grpc.trace_exporter", None)
    with pytest.raises(
        SettingsError, match=r"traces need opentelemetry\S+, which is not installed; pip install"
    ):
        traces.begin("test")
    assert traces.here() is None


def test_traces_are_off_unless_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not load(DaemonSettings).traces
    monkeypatch.setenv("ASTRAFLOW_TRACES", "true")
    assert load(ProcessSettings).traces
