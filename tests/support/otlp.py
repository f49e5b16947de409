"""What tests of traces need: a collector in this process, and the spans that it received."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import pytest
from opentelemetry.proto.trace.v1 import trace_pb2

from astraflow_bench.traces import Collector, Received
from astraflow_kit import traces

SOON = {"OTEL_BSP_SCHEDULE_DELAY": "100"}
ALL = {"OTEL_TRACES_SAMPLER": "parentbased_always_on"}


@contextmanager
def traced(monkeypatch: pytest.MonkeyPatch, collector: Collector, **variables: str) -> Iterator[None]:
    """This process records, as the service `astraflow-test`, while the block runs, and has sent what it could at the
    end.
    """
    for name, value in {**collector.environment, **SOON, **ALL, **variables}.items():
        monkeypatch.setenv(name, value)
    traces.begin("test")
    try:
        yield
    finally:
        traces.end()


def attributes(span: trace_pb2.Span) -> Mapping[str, object]:
    """The attributes of a span as plain values."""
    return {item.key: _plain(item.value) for item in span.attributes}


def _plain(value: object) -> object:
    kind = value.WhichOneof("value")  # type: ignore[attr-defined]
    found = getattr(value, kind)
    return tuple(map(_plain, found.values)) if kind == "array_value" else found


def named(received: Sequence[Received], name: str) -> list[trace_pb2.Span]:
    """The spans of this name."""
    return [one.span for one in received if one.span.name == name]
