"""What is due follows from the log alone."""

from dataclasses import replace

from astraflow_weights.publish.compaction import due_merges, snapshot_due
from astraflow_weights.settings import PublishSettings
from astraflow_weights.versions.history import VersionRecord
from support.log_records import added_path, version_record

SETTINGS = PublishSettings(snapshot_every_versions=6, snapshot_chain_ratio=0.5)


def chain(count: int, *, delta_bytes: int = 1) -> list[VersionRecord]:
    first = version_record(0, snapshot=100, deltas={})
    more = (
        version_record(version, snapshot=None, deltas={version - 1: delta_bytes})
        for version in range(1, count)
    )
    return [first, *more][:count]


def with_path(records: list[VersionRecord], version: int, base_version: int | None) -> list[VersionRecord]:
    path = added_path(version, base=base_version, size_bytes=100)
    changed = replace(records[version], added=(*records[version].added, path))
    return [*records[:version], changed, *records[version + 1 :]]


def spans(records: list[VersionRecord]) -> list[tuple[int, int]]:
    return [(span.base_version, span.version) for span in due_merges(records)]


def test_spans_of_8_and_64_are_due_once_their_last_version_is_there() -> None:
    assert spans([]) == spans(chain(8)) == []
    assert spans(chain(9)) == [(0, 8)]
    assert spans(chain(17)) == [(0, 8), (8, 16)]
    assert spans(with_path(chain(17), 8, 0)) == [(8, 16)]
    assert spans(chain(65))[-2:] == [(56, 64), (0, 64)]


def test_nothing_leads_over_a_version_that_has_no_delta() -> None:
    records = chain(17)
    records[3] = version_record(3, snapshot=100, deltas={})
    assert spans(records) == [(8, 16)]


def test_what_is_long_past_is_not_made_up_for() -> None:
    due = spans(chain(1001))
    assert min(base for base, _ in due) >= 1000 - 128 - 2 * 64
    assert (0, 8) not in due


def test_a_snapshot_is_due_when_the_chain_is_long_in_versions_or_bytes() -> None:
    by_length = [snapshot_due(chain(count), SETTINGS) for count in range(9)]
    assert by_length == [False, False, False, False, False, False, False, True, True]
    by_bytes = [snapshot_due(chain(count, delta_bytes=20), SETTINGS) for count in range(1, 6)]
    assert by_bytes == [False, False, False, True, True]


def test_a_snapshot_made_later_counts_like_one_in_the_manifest() -> None:
    assert not snapshot_due(with_path(chain(8), 7, None), SETTINGS)
    assert not snapshot_due(with_path(chain(8), 6, None), SETTINGS)
    assert not snapshot_due(with_path(chain(12), 6, None), SETTINGS)
    assert snapshot_due(with_path(chain(13), 6, None), SETTINGS)
