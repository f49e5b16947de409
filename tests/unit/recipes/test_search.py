"""The recipe of search: real passages and questions over HTTP, and chains of box, key and door at small size."""

import asyncio
import gzip
import json
import socket
import tracemalloc
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from itertools import islice
from pathlib import Path

import pytest
import uvicorn

from astraflow.data.task_files import read_rows
from astraflow.errors import PluginError
from astraflow.plugins import Message, MissingCapability, TaskSpec
from astraflow_environment.adapters.search import Search
from astraflow_environment.adapters.search_service import PassageIndex, SearchIndex, search_app
from astraflow_kit.http_answers import AnswerRefused
from support.http_server import answering
from support.recipes import played, recipe_code, task_data

recipe = recipe_code("search")
ROOM = "raas.workflow.with.max_tokens=4096"  # scripted policies have a token a character


@asynccontextmanager
async def searchable(index: SearchIndex) -> AsyncIterator[str]:
    """The URL of a service on loopback that searches in `index`."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        server = uvicorn.Server(uvicorn.Config(search_app(index), log_level="error", lifespan="off"))
        serving = asyncio.create_task(server.serve(sockets=[listening]))
        try:
            yield f"http://127.0.0.1:{port}/search"
        finally:
            server.should_exit = True
            await serving


def environment(url: str) -> str:
    """The override of a recipe that searches there."""
    use = "astraflow_environment.adapters.search:Search"
    return f'raas.workflow.with.environment={{use: "{use}", with: {{url: "{url}", top_k: 5}}}}'


@pytest.fixture(scope="module")
def doors() -> PassageIndex:
    return PassageIndex(list(recipe.passages()))


@pytest.fixture(scope="module")
def factbook() -> PassageIndex:
    file = task_data("factbook-search") / "passages.jsonl.gz"
    return PassageIndex(read_rows(file, fields={"doc_id": str, "title": str, "text": str}, remedy=""))


def script(*said: str) -> Iterator[str]:
    return iter([*said, "<answer></answer>"])


async def test_a_question_of_two_hops_is_answered_by_two_searches_and_not_by_one(
    factbook: PassageIndex, tmp_path: Path
) -> None:
    folder = task_data("factbook-search")
    rows = read_rows(folder / "questions.jsonl", fields={"kind": str}, remedy="")
    number = next(
        i
        for i, row in enumerate(r for r in rows if r["split"] == "test")
        if row["kind"] == "capital_via_highest_point"
    )
    async with (
        searchable(factbook) as url,
        played("search", f"run.dataset.with.folder={folder}", environment(url), scratch=tmp_path) as search,
    ):
        task = search.dataset.heldout(number)
        assert task is not None
        documents = {passage["doc_id"]: passage for passage in factbook._passages}
        titles = [documents[support]["title"] for support in task.data["support"]]
        assert len(titles) == 2
        hops = [f"I look it up. <search>{title}</search>" for title in titles]
        right = f"<answer>the {task.data['answer'].upper()}.</answer>"
        for said, reward, recall in (([*hops, right], 1.0, 1.0), ([right.replace("the ", "not ")], 0.0, 0.0)):
            lines = script(*said)
            episode = await search.episode(task, searcher=lambda _, lines=lines: next(lines))
            (trajectory,) = episode.trajectories
            assert (trajectory.policy, trajectory.reward) == ("searcher", reward)
            assert episode.metrics["environment.recall"] == recall
            assert episode.metrics["environment.searches"] == len(said) - 1


def test_every_real_question_has_its_answer_in_a_passage_that_supports_it(factbook: PassageIndex) -> None:
    fields = {"support": list, "answer": str}
    rows = read_rows(task_data("factbook-search") / "questions.jsonl", fields=fields, remedy="")
    texts = {passage["doc_id"]: passage["text"] for passage in factbook._passages}
    assert len(rows) == 1324
    assert [row for row in rows if not any(row["answer"] in texts[each] for each in row["support"])] == []


async def test_boxes_lead_to_doors_by_two_searches(doors: PassageIndex, tmp_path: Path) -> None:
    async with (
        searchable(doors) as url,
        played("search/small.yaml", environment(url), ROOM, scratch=tmp_path) as search,
    ):
        task = search.dataset.heldout(0)
        assert task is not None
        box = int(task.messages[0].content.removeprefix("box").rstrip("?"))
        key = recipe.key_of(box)
        said = script(
            f"<search>box{box}</search>",
            "hm",
            f"<search>key{key}</search>",
            f"<answer>{task.data['answer']}</answer>",
        )
        prompts: list[str] = []
        episode = await search.episode(task, searcher=lambda prompt: prompts.append(prompt) or next(said))
        assert episode.trajectories[0].reward == 1.0
        assert f"box{box}: inside lies key{key}" in prompts[1]
        assert "Write <search>" in prompts[2]
        assert (episode.metrics["environment.recall"], episode.metrics["environment.searches"]) == (1.0, 2.0)


async def test_a_query_that_is_longer_than_the_contract_allows_is_cut(doors: PassageIndex) -> None:
    async with searchable(doors) as url:
        search = Search(url=url, top_k=1)
        await search.reset(TaskSpec("t", ()))
        seen = await search.step(Message("assistant", f"<search>box47 {'zebra ' * 2000}</search>"))
    assert seen.messages[0].content.startswith("box47: inside lies key")


def test_each_hop_of_the_small_size_is_the_best_passage(doors: PassageIndex) -> None:
    for box in recipe.NUMBERS:
        for query in (f"box{box}", f"key{recipe.key_of(box)}"):
            assert doors.search(query, top_k=1)[0]["doc_id"] == query
    assert doors.search("zebra ?", top_k=3) == []
    assert len({recipe.door_of(recipe.key_of(box)) for box in recipe.NUMBERS}) == len(recipe.NUMBERS)


@pytest.mark.parametrize(
    ("said", "answer", "reward", "f1"),
    [
        ("<answer>Sao Tome</answer>", "São Tomé", 1.0, 1.0),
        ("<answer>Tome</answer> <answer>The São Tomé!</answer>", "São Tomé", 1.0, 1.0),
        ("<answer>Tome</answer>", "São Tomé", 0.0, 2 / 3),
        ("São Tomé", "São Tomé", 0.0, 0.0),
        ("<answer></answer>", "São Tomé", 0.0, 0.0),
        ("<answer>Москва 2</answer>", "москва 2", 1.0, 1.0),
        ("<answer>Киев 2</answer>", "Москва 2", 0.0, 1 / 2),
        ("I do not know.", "The", 0.0, 0.0),
    ],
)
def test_answers_are_compared_by_their_words(said: str, answer: str, reward: float, f1: float) -> None:
    score = recipe.ExactMatch()(TaskSpec("t", (), {"answer": answer}), said)
    assert (score.reward, score.metrics["f1"]) == (reward, pytest.approx(f1))


async def test_without_a_service_the_episode_is_given_back_with_the_command(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    async with played(
        "search/small.yaml", environment(f"http://127.0.0.1:{port}/search"), scratch=tmp_path
    ) as search:
        task = search.dataset.train(0)
        assert task is not None
        with pytest.raises(MissingCapability, match="search_service --passages"):
            await search.episode(task, searcher=lambda _: "<search>box</search>")


async def test_a_missing_folder_and_a_malformed_question_are_named(tmp_path: Path) -> None:
    folder = f"run.dataset.with.folder={tmp_path}"
    asked = {"split": "train", "question": "Where?"}
    for words, row in (
        ("give the folder that holds questions.jsonl", asked),
        ("questions.jsonl:1: no 'answer'", asked | {"split": "dev", "answer": "There."}),
        ("questions.jsonl has rows of split 1 'dev'; it needs train and test", {}),
    ):
        with pytest.raises(PluginError) as caught:
            async with played("search", folder, scratch=tmp_path):
                pass
        assert words in caught.value.message
        (tmp_path / "questions.jsonl").write_text(json.dumps(row))


def test_no_held_out_box_is_trained_on_or_demonstrated() -> None:
    data = recipe.Doors(seed=1)
    trained = {data.train(index).messages[0].content for index in range(500)}
    shown = {each.messages[0].content for each in islice(recipe.demonstrations(1), 1000)}
    held_out = {data.heldout(index).messages[0].content for index in range(500)}
    assert not held_out & (trained | shown)


@pytest.mark.parametrize(
    ("body", "times", "headers"),
    [(b"x" * 2**20, 1000, {}), (gzip.compress(bytes(2**26), mtime=0), 1, {"content-encoding": "gzip"})],
    ids=["long", "inflated"],
)
async def test_an_answer_of_a_service_is_read_to_its_limit_and_costs_no_more(
    body: bytes, times: int, headers: Mapping[str, str]
) -> None:
    with answering(body, times=times, headers=headers) as url:
        asking = Search(url=url)
        tracemalloc.start()
        with pytest.raises(AnswerRefused, match="answered more than 16777216 bytes"):
            await asking.step(Message("assistant", "<search>rye</search>"))
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 2**26
