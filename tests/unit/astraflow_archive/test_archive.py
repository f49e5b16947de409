"""The archive of a run: what goes in comes out exactly, once, page by page, and old files go."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.dataset
import pyarrow.parquet
import pytest

from astraflow.columns import decode_columns
from astraflow.dataflow.v1.batch_pb2 import BatchItem
from astraflow.dataflow.v1.sample_pb2 import Sample
from astraflow.dataflow.v1.sample_service_pb2 import ListSamplesRequest
from astraflow.errors import InvalidArgumentError, NotFoundError
from astraflow.recipe.dataflow import ArchiveSettings
from astraflow.rollout.v1.trajectory_pb2 import LOGPROB_DTYPE_BF16, LOGPROB_DTYPE_F32, Trajectory
from astraflow_archive import archive as module
from astraflow_archive.archive import Archive
from astraflow_archive.columns import Row
from astraflow_archive.trainer_logprobs import write
from astraflow_weights.store.file import FileStore
from support.dataflow_world import make_trajectory

T0_MS = 1763890000000
SPAN = f"{T0_MS}-0_{T0_MS}-9"


@pytest.fixture
def store(tmp_path: Path) -> FileStore:
    return FileStore(tmp_path / "store")


@pytest.fixture
def archive(store: FileStore) -> Archive:
    return Archive(store, "run")


def row(
    number: int, *, policy_id: str = "solver", step: int = 1, reason: str = "trained", **item: Any
) -> Row:
    """One sample, whose body is that of a trajectory with `number` % 5 + 1 sampled tokens."""
    trajectory_id = f"t{number}"
    made = make_trajectory(trajectory_id, num_response=number % 5 + 1)
    sizes = {"num_tokens": made.header.num_tokens, "num_trainable_tokens": made.header.num_trainable_tokens}
    facts = (
        {"trajectory_id": trajectory_id, "task_id": f"task{number // 2}", "source": "gsm8k"} | sizes | item
    )
    sample = Sample(
        policy_id=policy_id, step=step, reason=reason, episode_id=f"e{number}", item=BatchItem(**facts)
    )
    sample.end_time.FromMilliseconds(T0_MS + number)
    return Row(sample, made.body)


def listed(archive: Archive, *, size: int = 1000, **wanted: Any) -> list[str]:
    """The trajectories of all pages."""
    ids, token = [], ""
    while True:
        page = archive.page(ListSamplesRequest(page_token=token, **wanted), size=size)
        assert len(page.samples) <= size
        ids += [sample.item.trajectory_id for sample in page.samples]
        token = page.next_page_token
        if not token:
            return ids


def test_a_trajectory_comes_back_as_it_was_sampled(archive: Archive) -> None:
    body = Trajectory.FromString(make_trajectory("t7", num_response=3).body)
    body.version_spans[0].recomputed = True
    body.turn_spans.add(start=0, end=4, role="user")
    body.turn_spans.add(start=4, end=7, role="assistant", reward=0.5)
    body.sampling.top_k = 20
    body.expert_routing.uri = "file:///store/run/blobs/routing"
    wanted = row(7, reward=1.5, min_version=3, max_version=4, role="solver", turn=2, truncated=True)
    archive.add([Row(wanted.sample, body.SerializeToString())], span=SPAN)
    (sample,) = archive.page(ListSamplesRequest(), size=10).samples
    (content,) = archive.contents([sample.sample_id]).samples
    assert content.trajectory == body
    assert content.sample == sample
    wanted.sample.sample_id = sample.sample_id
    assert sample == wanted.sample


def test_bfloat16_logprobs_come_back_as_the_same_numbers_in_float32(archive: Archive) -> None:
    body = Trajectory.FromString(make_trajectory("t1", num_response=2).body)
    halves = np.array([0, 0, 0, 0, 0xBF00, 0xC040], dtype="<u2")  # −0.5, −3
    body.logprobs, body.logprob_dtype = halves.tobytes(), LOGPROB_DTYPE_BF16
    archive.add([Row(row(1).sample, body.SerializeToString())], span=SPAN)
    (sample,) = archive.page(ListSamplesRequest(), size=1).samples
    (content,) = archive.contents([sample.sample_id]).samples
    assert content.trajectory.logprob_dtype == LOGPROB_DTYPE_F32
    assert decode_columns(content.trajectory).logprobs.tolist() == [0, 0, 0, 0, -0.5, -3.0]


def test_a_pack_that_is_written_again_is_there_once(archive: Archive, store: FileStore) -> None:
    rows = [row(number, step=number % 3) for number in range(10)]
    first = archive.add(rows, span=SPAN)
    before = {info.key: store.get(info.key) for info in store.list("run/")}
    assert archive.add(rows, span=SPAN) == first
    assert {info.key: store.get(info.key) for info in store.list("run/")} == before
    assert len(before) == 3
    assert sorted(listed(archive)) == sorted(f"t{number}" for number in range(10))


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
def test_pages_have_every_sample_once_in_order(archive: Archive, size: int) -> None:
    for start in range(0, 30, 10):
        archive.add(
            [
                row(number, policy_id=f"p{number % 2}", step=start // 10 + 9)
                for number in range(start, start + 10)
            ],
            span=f"{T0_MS + start}-0_{T0_MS + start}-1",
        )
    even, odd = [[f"t{number}" for number in range(first, 30, 2)] for first in (0, 1)]
    assert listed(archive, size=size) == even + odd


def test_a_page_reads_a_bounded_number_of_files(archive: Archive, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_FILES_PER_PAGE", 2)
    archive.add([row(number, step=number) for number in range(9)], span=SPAN)
    page = archive.page(ListSamplesRequest(source="nowhere"), size=10)
    assert (len(page.samples), bool(page.next_page_token)) == (0, True)
    assert listed(archive) == [f"t{number}" for number in range(9)]


def test_samples_are_chosen_by_what_they_are(archive: Archive) -> None:
    archive.add(
        [
            row(0, reward=0.0, min_version=1, max_version=3),
            row(1, reward=1.0, min_version=3, max_version=3, source="math", role="checker"),
            row(2, step=2, reward=0.5, min_version=4, max_version=4, reason="stale"),
            row(3, step=3, policy_id="judge", reward=-1.0, min_version=9, max_version=9, reason="filtered"),
        ],
        span=SPAN,
    )
    expected: list[tuple[dict[str, Any], list[str]]] = [
        ({"policy_id": "solver"}, ["t0", "t1", "t2"]),
        ({"policy_id": "solver", "min_step": 2}, ["t2"]),
        ({"min_step": 2}, ["t3", "t2"]),
        ({"max_step": 2, "min_step": 2}, ["t2"]),
        ({"reasons": ["stale", "filtered"]}, ["t3", "t2"]),
        ({"source": "math"}, ["t1"]),
        ({"task_id": "task0"}, ["t0", "t1"]),
        ({"role": "checker"}, ["t1"]),
        ({"role": "judge"}, ["t3"]),
        ({"min_tokens": 7}, ["t3", "t2"]),
        ({"max_tokens": 5}, ["t0"]),
        ({"min_reward": 0.5}, ["t1", "t2"]),
        ({"max_reward": 0.0}, ["t3", "t0"]),
        ({"version": 3}, ["t0", "t1"]),
        ({"version": 0}, []),
    ]
    for wanted, ids in expected:
        assert listed(archive, **wanted) == ids, wanted


def test_an_answer_with_tokens_is_bounded_and_has_at_least_one(
    archive: Archive, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive.add([row(number) for number in range(4)], span=SPAN)
    ids = [sample.sample_id for sample in archive.page(ListSamplesRequest(), size=9).samples]
    (one,) = archive.contents(ids[:1]).samples
    monkeypatch.setattr(module, "MAX_ANSWER_BYTES", one.ByteSize() * 5 // 2)
    answer = archive.contents(ids)
    assert [content.sample.sample_id for content in answer.samples] == ids[:2]
    monkeypatch.setattr(module, "MAX_ANSWER_BYTES", 1)
    assert len(archive.contents(ids).samples) == 1


def test_a_sample_in_a_later_row_group_is_found(archive: Archive) -> None:
    archive.add([row(number) for number in range(300)], span=SPAN)
    samples = archive.page(ListSamplesRequest(), size=1000).samples
    (content,) = archive.contents([samples[271].sample_id]).samples
    assert content.trajectory.trajectory_id == content.sample.item.trajectory_id == "t271"


def test_a_sample_that_is_not_there_is_named(archive: Archive) -> None:
    archive.add([row(0)], span=SPAN)
    (sample,) = archive.page(ListSamplesRequest(), size=1).samples
    for wrong in (sample.sample_id[:-1] + "1", sample.sample_id.replace("solver", "judge")):
        with pytest.raises(NotFoundError, match=wrong):
            archive.contents([wrong])
    with pytest.raises(InvalidArgumentError, match="nonsense"):
        archive.page(ListSamplesRequest(page_token="nonsense"), size=1)


def test_files_that_are_too_old_or_too_many_are_deleted_oldest_first(
    archive: Archive, store: FileStore
) -> None:
    day_ms = 86_400_000
    for day in range(4):
        ms = T0_MS + day * day_ms
        archive.add([row(day)], span=f"{ms}-0_{ms}-0")
    settings = ArchiveSettings(keep_days=2)
    assert archive.collect(settings, now_ms=T0_MS + 3 * day_ms) == 1
    assert listed(archive) == ["t1", "t2", "t3"]
    sizes = [info.size_bytes for info in store.list("run/")]
    kept = (sizes[-1] + 1) / 2**30
    assert archive.collect(ArchiveSettings(keep_gib=kept), now_ms=T0_MS + 3 * day_ms) == 2
    assert listed(archive) == ["t3"]
    assert archive.collect(ArchiveSettings(), now_ms=T0_MS + 999 * day_ms) == 0
    assert (archive.delete(), listed(archive)) == (1, [])


def test_a_sample_has_what_its_trainer_made_of_it(archive: Archive, store: FileStore) -> None:
    rows = [row(number, step=number // 3 + 1) for number in range(6)]
    dropped = row(6, step=1, reason="stale")
    for held in rows:
        held.sample.batch_id = "b"
    archive.add([*rows, dropped], span=SPAN)
    made = {f"t{n}": np.array([np.nan, -0.25 * n - 0.1], dtype=np.float32) for n in (0, 1, 3, 6)}
    # Two ranks of step 1, one of step 2; t2, t4 and t5 were not trained on, and t6 was in no batch.
    for step, names in ((1, ["t0"]), (1, ["t6", "t1"]), (2, ["t3"])):
        write(store, "run", policy_id="solver", step=step, logprobs={name: made[name] for name in names})
    ids = [sample.sample_id for sample in archive.page(ListSamplesRequest(), size=10).samples]
    found = {
        content.sample.item.trajectory_id: content.trainer_logprobs
        for content in archive.contents(ids).samples
    }
    wanted = {name: made[name].astype("<f4").tobytes() for name in ("t0", "t1", "t3")}
    assert found == dict.fromkeys(("t2", "t4", "t5", "t6"), b"") | wanted


def test_a_step_that_is_replayed_adds_no_file(store: FileStore) -> None:
    for value in (-1.0, -1.5):
        logprobs = {name: np.full(3, value, dtype=np.float32) for name in ("t1", "t0")}
        write(store, "run", policy_id="solver", step=7, logprobs=logprobs)
    (info,) = store.list("run/")
    table = pyarrow.parquet.read_table(io.BytesIO(store.get(info.key)))
    assert table.to_pylist() == [
        {"trajectory_id": name, "logprobs": [-1.0, -1.0, -1.0]} for name in ("t0", "t1")
    ]


def test_what_trainers_made_of_a_step_goes_with_its_last_sample(archive: Archive, store: FileStore) -> None:
    for number, step in enumerate((1, 1, 2)):
        ms = T0_MS + number
        archive.add([row(number, step=step)], span=f"{ms}-0_{ms}-0")
    for step in (1, 2, 3):  # the samples of step 3 are still to come
        made = {"t": np.full(1, step, dtype=np.float32)}
        write(store, "run", policy_id="solver", step=step, logprobs=made)

    def kept() -> tuple[list[str], int]:
        return listed(archive), len(list(store.list("run/archive=1/trainer_logprobs/")))

    def size(folder: str = "") -> int:
        return sum(info.size_bytes for info in store.list(f"run/archive=1/{folder}"))

    pending = size(f"trainer_logprobs/policy=solver/step={3:020d}/")
    for expected in ((["t1", "t2"], 3), (["t2"], 2), ([], 1)):
        archive.collect(ArchiveSettings(keep_gib=(size() - pending - 1) / 2**30), now_ms=T0_MS)
        assert kept() == expected
    assert archive.delete() == 1


def test_other_tools_read_the_files_as_one_table(archive: Archive, tmp_path: Path) -> None:
    archive.add([row(number, step=number % 2 + 1, reward=float(number)) for number in range(6)], span=SPAN)
    folder = tmp_path / "store" / "run" / "archive=1" / "samples"
    table = pyarrow.dataset.dataset(folder, partitioning="hive").to_table(
        columns=["policy", "step", "reward"]
    )
    rows = sorted(table.to_pylist(), key=lambda found: found["reward"])
    assert rows == [{"policy": "solver", "step": n % 2 + 1, "reward": float(n)} for n in range(6)]
