"""What every object store must do, over a folder and over S3 (moto), and how S3 faults are met."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import boto3
import pytest
from moto.server import ThreadedMotoServer

from astraflow_weights.errors import ObjectNotFound, StoreRefused, Unavailable
from astraflow_weights.mirror import Mirror
from astraflow_weights.publisher import Publisher
from astraflow_weights.settings import StoreSettings
from astraflow_weights.store import ObjectInfo, ObjectStore, PutResult, open_store, probe_create_only
from astraflow_weights.version_log import VersionLog
from astraflow_weights.version_writer import VersionWriter
from support.weight_models import POLICY, RUN, make_model, same_model, trained

pytestmark = pytest.mark.integration

CREDENTIALS = "[default]\naws_access_key_id = test\naws_secret_access_key = test\n"


@pytest.fixture(scope="module")
def s3_endpoint() -> Iterator[str]:
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def credentials_file(tmp_path: Path) -> Path:
    path = tmp_path / "credentials"
    path.write_text(CREDENTIALS)
    return path


@pytest.fixture
def s3_settings(s3_endpoint: str, credentials_file: Path) -> StoreSettings:
    return StoreSettings(
        endpoint_url=s3_endpoint,
        region="us-east-1",
        credentials_file=credentials_file,
        max_attempts=2,
        backoff_s=0.01,
    )


@pytest.fixture(params=["file", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    if request.param == "file":
        return open_store((tmp_path / "store").as_uri())
    settings: StoreSettings = request.getfixturevalue("s3_settings")
    client = boto3.client(
        "s3",
        endpoint_url=settings.endpoint_url,
        region_name="us-east-1",
        aws_access_key_id="test",
        aws_secret_access_key="test",
    )
    bucket = f"bucket-{abs(hash(tmp_path)):x}"
    client.create_bucket(Bucket=bucket)
    client.close()
    return open_store(f"s3://{bucket}/some/prefix", settings=settings)


def test_a_key_is_created_once(store: ObjectStore) -> None:
    assert store.put_if_absent("a/key", b"first") is PutResult.CREATED
    assert store.put_if_absent("a/key", b"second") is PutResult.EXISTS
    assert store.get("a/key") == b"first"


def test_the_probe_accepts_it_and_leaves_nothing(store: ObjectStore) -> None:
    probe_create_only(store)
    assert list(store.list("")) == []


def test_of_racing_creators_exactly_one_wins(store: ObjectStore) -> None:
    for round_number in range(5):
        barrier = threading.Barrier(6)

        def create(
            content: bytes, key: str = f"race/{round_number}", barrier: threading.Barrier = barrier
        ) -> PutResult:
            barrier.wait(timeout=10)
            return store.put_if_absent(key, content)

        contents = [b"writer %d" % writer for writer in range(6)]
        with ThreadPoolExecutor(6) as pool:
            results = list(pool.map(create, contents))
        assert results.count(PutResult.CREATED) == 1
        assert store.get(f"race/{round_number}") == contents[results.index(PutResult.CREATED)]


def test_hints_are_overwritten(store: ObjectStore) -> None:
    store.put("latest", b"1")
    store.put("latest", b"2")
    assert store.get("latest") == b"2"


@pytest.mark.parametrize("size", [0, 1, 300_000])
def test_content_comes_back_whole(store: ObjectStore, size: int) -> None:
    content = bytes(range(256)) * (size // 256) + bytes(size % 256)
    store.put_if_absent("key", content)
    assert store.get("key") == content
    assert store.head("key") == ObjectInfo(key="key", size_bytes=size)


@pytest.mark.parametrize(
    ("start", "length", "expected"),
    [(0, 4, b"0123"), (3, 2, b"34"), (8, 10, b"89"), (10, 5, b""), (99, 1, b""), (5, 0, b"")],
)
def test_ranges_are_cut_at_the_end(store: ObjectStore, start: int, length: int, expected: bytes) -> None:
    store.put_if_absent("key", b"0123456789")
    assert store.get_range("key", start=start, length=length) == expected


def test_what_is_missing_is_not_found(store: ObjectStore) -> None:
    for read in (store.get, store.head, lambda key: store.get_range(key, start=0, length=0)):
        with pytest.raises(ObjectNotFound, match="has no object 'no/such'"):
            read("no/such")


def test_deleting_is_idempotent(store: ObjectStore) -> None:
    store.put_if_absent("key", b"x")
    store.delete("key")
    store.delete("key")
    with pytest.raises(ObjectNotFound):
        store.get("key")
    assert store.put_if_absent("key", b"y") is PutResult.CREATED


def test_listing_is_ordered_by_key_and_limited_by_prefix_and_after(store: ObjectStore) -> None:
    for key in ("b/2", "a/1", "b/10", "b/1", "bc"):
        store.put_if_absent(key, key.encode())
    assert [info.key for info in store.list("")] == ["a/1", "b/1", "b/10", "b/2", "bc"]
    assert list(store.list("b/", after="b/1")) == [
        ObjectInfo(key="b/10", size_bytes=4),
        ObjectInfo(key="b/2", size_bytes=3),
    ]
    assert [info.key for info in store.list("b")] == ["b/1", "b/10", "b/2", "bc"]
    assert list(store.list("none/")) == []


@pytest.mark.parametrize("key", ["../escape", "/absolute", "", "a//b", "a/../../b"])
def test_keys_that_leave_the_store_are_refused(store: ObjectStore, key: str) -> None:
    with pytest.raises(ValueError, match="not allowed"):
        store.put_if_absent(key, b"x")


def test_versions_travel_from_publisher_to_mirror(store: ObjectStore, tmp_path: Path) -> None:
    publisher = Publisher(VersionWriter.open(store, run_id=RUN, policy_id=POLICY, epoch=1), base=None)
    model = make_model()
    for step in range(4):
        model = trained(model, step) if step else model
        publisher.publish(model, step=step)
    log = VersionLog(store, run_id=RUN, policy_id=POLICY)
    assert log.refresh() == 3
    mirror = Mirror(tmp_path / "mirror")
    mirror.advance(store, log, target=1)
    assert mirror.advance(store, log, target=3).counts.deltas_fetched == 2
    assert same_model(mirror.load(), model)


def test_a_listing_of_many_pages_is_whole(s3_settings: StoreSettings) -> None:
    client = boto3.client(
        "s3",
        endpoint_url=s3_settings.endpoint_url,
        region_name="us-east-1",
        aws_access_key_id="test",
        aws_secret_access_key="test",
    )
    client.create_bucket(Bucket="many")
    for number in range(1005):
        client.put_object(Bucket="many", Key=f"seq/{number:05d}", Body=b"")
    client.close()
    store = open_store("s3://many", settings=s3_settings)
    assert [info.key for info in store.list("seq/")] == [f"seq/{number:05d}" for number in range(1005)]


def test_a_missing_bucket_is_refused_with_the_remedy(s3_settings: StoreSettings) -> None:
    store = open_store("s3://no-such-bucket", settings=s3_settings)
    with pytest.raises(StoreRefused, match=r"NoSuchBucket.*check bucket name"):
        store.put_if_absent("key", b"x")


def test_an_unknown_profile_is_refused(s3_settings: StoreSettings) -> None:
    with pytest.raises(StoreRefused, match="nobody"):
        open_store("s3://bucket", settings=s3_settings.model_copy(update={"profile": "nobody"}))


@dataclass
class Script:
    """What a fake S3 endpoint does: one answer per request, then 200 with what it holds."""

    answers: list[str | int] = field(default_factory=list)
    objects: dict[str, bytes] = field(default_factory=dict)
    requests: list[tuple[str, str | None]] = field(default_factory=list)


@pytest.fixture
def script() -> Script:
    return Script()


@pytest.fixture
def faulty(script: Script, credentials_file: Path) -> Iterator[ObjectStore]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler(script))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    settings = StoreSettings(
        endpoint_url=f"http://127.0.0.1:{server.server_port}",
        credentials_file=credentials_file,
        max_attempts=3,
        backoff_s=0.001,
        read_timeout_s=0.3,
    )
    yield open_store("s3://bucket", settings=settings)
    server.shutdown()
    server.server_close()
    thread.join(timeout=5)


def handler(script: Script) -> type[BaseHTTPRequestHandler]:
    """A request handler that follows the script. `lost` does the work and drops the connection; `stall` and
    `cut` answer too late or too little.
    """

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_PUT(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            script.requests.append(("PUT", self.headers.get("If-None-Match")))
            answer = script.answers.pop(0) if script.answers else 200
            if answer in (200, "lost"):
                if self.path in script.objects and self.headers.get("If-None-Match") == "*":
                    answer = 412
                else:
                    script.objects[self.path] = body
            self.answer(answer, b"")

        def do_GET(self) -> None:
            script.requests.append(("GET", None))
            answer = script.answers.pop(0) if script.answers else 200
            if answer == 200 and self.path not in script.objects:
                answer = 404
            self.answer(answer, script.objects.get(self.path, b""))

        def answer(self, answer: str | int, body: bytes) -> None:
            if answer == "lost":
                self.close_connection = True
                return
            if answer == "stall":
                threading.Event().wait(0.6)
                self.close_connection = True
                return
            content = body if answer in (200, "cut") else error_body(int(answer))
            self.send_response(200 if answer == "cut" else int(answer))
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content[: len(content) // 2] if answer == "cut" else content)
            self.close_connection = answer == "cut"

        def log_message(self, *_: object) -> None:
            pass

    return Handler


def error_body(status: int) -> bytes:
    code = {
        404: "NoSuchKey",
        409: "ConditionalRequestConflict",
        412: "PreconditionFailed",
        403: "AccessDenied",
    }
    return f"<Error><Code>{code.get(status, 'SlowDown')}</Code><Message/></Error>".encode()


@pytest.mark.parametrize("fault", [500, 503, 429, 409, "stall"])
def test_a_passing_fault_is_retried_with_the_same_condition(
    faulty: ObjectStore, script: Script, fault: str | int
) -> None:
    script.answers = [fault]
    assert faulty.put_if_absent("key", b"mine") is PutResult.CREATED
    assert script.objects["/bucket/key"] == b"mine"
    assert set(script.requests) == {("PUT", "*")}


def test_a_lost_answer_is_settled_by_reading_back(faulty: ObjectStore, script: Script) -> None:
    script.answers = ["lost"]
    assert faulty.put_if_absent("key", b"mine") is PutResult.CREATED
    assert script.requests == [("PUT", "*"), ("PUT", "*"), ("GET", None)]


def test_a_lost_answer_does_not_hide_that_another_won(faulty: ObjectStore, script: Script) -> None:
    script.objects["/bucket/key"] = b"theirs"
    script.answers = [500]
    assert faulty.put_if_absent("key", b"mine") is PutResult.EXISTS
    assert script.objects["/bucket/key"] == b"theirs"


@pytest.mark.parametrize("fault", ["cut", "stall", "lost", 503])
def test_an_answer_cut_short_is_read_again(faulty: ObjectStore, script: Script, fault: str | int) -> None:
    script.objects["/bucket/key"] = b"content" * 100
    script.answers = [fault]
    assert faulty.get("key") == b"content" * 100


def test_a_lasting_fault_ends_as_unavailable(faulty: ObjectStore, script: Script) -> None:
    script.answers = [503] * 10
    with pytest.raises(Unavailable, match=r"'key' failed 3 times, last: SlowDown \(503\)"):
        faulty.put_if_absent("key", b"x")
    assert len(script.requests) == 3


def test_refused_credentials_are_not_retried(faulty: ObjectStore, script: Script) -> None:
    script.answers = [403]
    with pytest.raises(StoreRefused, match=r"AccessDenied \(403\).*credentials"):
        faulty.get("key")
    assert len(script.requests) == 1


def test_nothing_listens_is_unavailable(credentials_file: Path) -> None:
    settings = StoreSettings(
        endpoint_url="http://127.0.0.1:9", credentials_file=credentials_file, max_attempts=2, backoff_s=0.001
    )
    with pytest.raises(Unavailable, match="check the store's health"):
        open_store("s3://bucket", settings=settings).get("key")
