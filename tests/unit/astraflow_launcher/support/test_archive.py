"""An archive holds no recognisable secret, stays bounded, and says what it has and what it lacks."""

from pathlib import Path

import pytest

from astraflow_launcher.support.archive import Archive, redacted
from support import archives


def content(path: Path) -> dict[str, str]:
    return {name: held.decode() for name, held in archives.content(path).items()}


@pytest.mark.parametrize(
    ("text", "secret"),
    [
        ("ASTRAFLOW_TOKEN=hunter2", "hunter2"),
        ("AWS_SECRET_ACCESS_KEY=hunter2", "hunter2"),
        ("AWS_ACCESS_KEY_ID=AKIAHUNTER", "AKIAHUNTER"),
        ("redis://:hunter2@127.0.0.1:6379/0", "hunter2"),
        ("redis://user:hunter2@host:6379", "hunter2"),
        ("https://ghp_hunter2@host/repository", "ghp_hunter2"),
        ('{"password": "hunter2"}', "hunter2"),
        ("'api_key': 'hunter2'", "hunter2"),
        ("authorization: Bearer hunter2", "hunter2"),
        ("GET /part?X-Amz-Signature=hunter2&x=1", "hunter2"),
        ("--secret=hunter2", "hunter2"),
    ],
)
def test_secrets_are_blanked(text: str, secret: str) -> None:
    assert secret not in redacted(text)
    assert "***" in redacted(text)


@pytest.mark.parametrize(
    "text",
    [
        '{"max_new_tokens": 12, "num_tokens": 40960}',
        "--token-file /run/token",
        "http://127.0.0.1:7071/status",
        'tokens=128 key="step-3" policy=solver',
    ],
)
def test_what_is_no_secret_stays(text: str) -> None:
    assert redacted(text) == text


def test_a_long_log_keeps_its_end_in_whole_lines_and_says_what_is_left_out(tmp_path: Path) -> None:
    log = tmp_path / "node.log"
    log.write_text("".join(f"line {number}\n" for number in range(1000)))
    with Archive(tmp_path / "out.tar.gz") as archive:
        archive.add_tail("node.log", log, about="log", limit_bytes=100)
    first, *kept = content(tmp_path / "out.tar.gz")["node.log"].splitlines()
    assert kept[-1] == "line 999"
    assert all(line.startswith("line ") for line in kept)
    left_out = log.stat().st_size - sum(len(line) + 1 for line in kept)
    assert first == f"… the first {left_out} bytes are left out"


def test_a_source_that_fails_is_named_and_the_rest_is_packed(tmp_path: Path) -> None:
    with Archive(tmp_path / "out.tar.gz") as archive:
        archive.attempt("gone.log", lambda: archive.add_tail("g", tmp_path / "gone", about=""), OSError)
        archive.add_text("here.txt", "present", about="what is here")
    packed = content(tmp_path / "out.tar.gz")
    assert packed["here.txt"] == "present"
    assert "here.txt  what is here" in packed["README.txt"]
    assert "- gone.log: " in packed["README.txt"]


def test_a_defect_in_collecting_is_not_swallowed_and_leaves_no_half_archive(tmp_path: Path) -> None:
    def fail() -> None:
        raise KeyError("defect")

    with pytest.raises(KeyError), Archive(tmp_path / "out.tar.gz") as archive:
        archive.attempt("x", fail, OSError)
    assert list(tmp_path.iterdir()) == []


def test_many_files_of_one_kind_take_one_line_of_the_index(tmp_path: Path) -> None:
    with Archive(tmp_path / "out.tar.gz") as archive:
        for number in range(10):
            archive.add_text(f"seq/{number}", "", about="a manifest")
    index = content(tmp_path / "out.tar.gz")["README.txt"]
    assert "seq/ (10 files)  each: a manifest" in index
    assert "seq/3" not in index
