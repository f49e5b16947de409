"""Folders in Harbor's layout become tasks; what cannot be played here is refused with file and line."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from astraflow.data.task_folders import FolderTasks, parse_task, read_task
from astraflow.errors import RecipeError

TASK = {
    "task.toml": 'version = "1.0"\n[verifier]\ntimeout_sec = 12\n[agent]\ntimeout_sec = 34.5\n',
    "instruction.md": "Sort the lines.\n",
    "environment/Dockerfile": "# how it begins\nFROM debian\nWORKDIR /srv/w\nENV MODE=fast WHO='a b'\n"
    "COPY in.txt data/ \\\n  ./\nCOPY in.txt /srv/copy.txt\nWORKDIR sub\nCMD bash\n",
    "environment/in.txt": "b\na\n",
    "environment/data/deep/x.bin": "x",
    "tests/test.sh": "echo 1 > /logs/verifier/reward.txt\n",
    "tests/check.py": "assert True\n",
    "solution/solve.sh": "sort in.txt\n",
}


def write(folder: Path, files: Mapping[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def test_a_folder_is_a_task_with_the_beginning_that_its_dockerfile_describes(tmp_path: Path) -> None:
    task = read_task(write(tmp_path / "sort", TASK))
    assert (task.name, task.instruction, task.folder) == ("sort", "Sort the lines.", "/srv/w/sub")
    assert dict(task.files) == {
        "/srv/w/in.txt": b"b\na\n",
        "/srv/w/deep/x.bin": b"x",
        "/srv/copy.txt": b"b\na\n",
    }
    assert dict(task.variables) == {"MODE": "fast", "WHO": "a b"}
    assert set(task.tests) == {"/tests/test.sh", "/tests/check.py"}
    assert (task.agent_s, task.grade_s, task.solution) == (34.5, 12.0, "sort in.txt\n")


RUN = {
    "environment/Dockerfile": "FROM debian\n\nRUN apt-get update \\\n && apt-get install -y jq\nWORKDIR /x\n"
}


def test_what_an_image_would_run_is_passed_over_only_where_the_machine_is_built_so() -> None:
    files = {name: text.encode() for name, text in (TASK | RUN).items()}
    assert parse_task("t", files, where="here", built=True).folder == "/x"
    with pytest.raises(
        RecipeError, match=r"here/environment/Dockerfile:3: RUN apt-get update .*`built: true`"
    ):
        parse_task("t", files, where="here")


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (
            {"tests/test.sh": None, "instruction.md": None},
            "t: no instruction.md, no tests/test.sh; a task has",
        ),
        ({"task.toml": "[agent]\ntimeout_sec = \n"}, "t/task.toml:2: not TOML"),
        (
            {"task.toml": "\n[agent]\n\ntimeout_sec = 'long'\n"},
            "t/task.toml:4: agent.timeout_sec is 'long'; give",
        ),
        ({"task.toml": "[verifier]\ntimeout_sec = -1\n"}, "t/task.toml:2: verifier.timeout_sec is -1"),
        ({"task.toml": "agent = 3\n"}, "t/task.toml:1: agent is a section"),
        ({"task.toml": "x = 1\n[[steps]]\nname = 'a'\n"}, "t/task.toml:2: tasks of several steps"),
        ({"task.toml": "[environment]\ndocker_image = 'a'\n"}, "t/task.toml:2: the task wants an image"),
        (
            {"environment/docker-compose.yaml": ""},
            "t/environment/docker-compose.yaml: tasks of several containers",
        ),
        (
            {"environment/Dockerfile": "FROM a\nCOPY no.txt .\n"},
            "Dockerfile:2: COPY no.txt: environment/ has no",
        ),
        (
            {"environment/Dockerfile": "COPY --from=b /x /y\n"},
            "Dockerfile:1: COPY names files of environment/",
        ),
        ({"environment/Dockerfile": "FROM a\n\nVOLUME /x\n"}, "Dockerfile:3: VOLUME is no instruction"),
        ({"environment/Dockerfile": "ENV A='open\n"}, "Dockerfile:1: No closing quotation"),
        *(
            (
                {"environment/Dockerfile": f"WORKDIR {folder}\n"},
                f"Dockerfile: WORKDIR is {shown}; the tests are",
            )
            for folder, shown in {"/": "/", "/tests/x": "/tests/x", "/app/../etc": "/etc", "..": "/"}.items()
        ),
    ],
)
def test_a_malformed_task_is_refused_with_file_and_line(changed: Mapping[str, str | None], said: str) -> None:
    files = {name: text.encode() for name, text in (TASK | changed).items() if text is not None}
    with pytest.raises(RecipeError) as caught:
        parse_task("t", files, where="t")
    assert said in caught.value.message


def test_a_task_belongs_to_one_split_by_its_name_or_by_its_folder(tmp_path: Path) -> None:
    names = [f"task-{number}" for number in range(40)]
    for name in names:
        write(tmp_path / "all" / name, TASK | {"instruction.md": name})
    tasks = FolderTasks(seed=0, folder=tmp_path / "all")
    epoch = [tasks.train(index) for index in range(37)]
    trained = {task.data["task"] for task in epoch if task is not None}
    kept = {task.data["task"] for index in range(40) if (task := tasks.heldout(index))}
    assert trained | kept == set(names)
    assert not trained & kept
    assert kept
    own = FolderTasks(seed=0, folder=tmp_path / "all", heldout=write(tmp_path / "other" / "one", TASK).parent)
    assert [own.heldout(0).data["task"], own.heldout(1)] == ["one", None]  # type: ignore[union-attr]
    with pytest.raises(RecipeError, match=r"share 40 names, 'task-0' among them; a task has one folder"):
        FolderTasks(seed=0, folder=tmp_path / "all", heldout=tmp_path / "all")


def test_a_folder_without_tasks_or_without_one_to_hold_out_is_refused_with_the_option(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"no folder with a task.toml; .*run.dataset.with.folder=FOLDER"):
        FolderTasks(seed=0, folder=tmp_path)
    write(tmp_path / "task-0", TASK)
    with pytest.raises(RecipeError, match=r"has 1 tasks, .*run.dataset.with.heldout=FOLDER"):
        FolderTasks(seed=0, folder=tmp_path)
