"""The dashboard as people see it: in a real Chromium, over a run of 100,000 steps and 64 nodes, and over a live one.

`ASTRAFLOW_PICTURES=docs/img` keeps the pictures that the manual shows, and what pages cost.
"""

import json
import os
import re
import subprocess
from collections.abc import AsyncIterator
from itertools import count
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from astraflow.dataflow.v1.batch_service_pb2 import BATCH_STAGE_TRAINED as TRAINED
from astraflow.dataflow.v1.run_service_pb2 import DeleteRunResponse
from support.chromium import DASHBOARD, look, require_browser
from support.dataflow_fixtures import pytest_generate_tests, redis_binary, redis_url, valkey, world
from support.dataflow_world import World, served
from support.hostile_texts import HOSTILE
from support.recorded_run import Turn, pages, record
from support.tokens import OTHER_KEY, jwk, keys_file, token

__all__ = ["pytest_generate_tests", "redis_binary", "redis_url", "valkey", "world"]

pytestmark = [pytest.mark.ci, pytest.mark.e2e, pytest.mark.timeout(300)]

MAX_BYTES = 300_000
MANUAL = Path(__file__).resolve().parents[2] / "docs" / "dashboard.md"
PICTURES = ("progress", "sample", "weights", "phone")
"""What the manual shows."""
DRAWN = "#content:has(.plot:not([hidden]) canvas):not(:has(.plot:empty:not([hidden])))"
"""There are charts, and each is drawn or says what it lacks."""
CURVES = ("progress", "stability", "freshness", "shape", "trainer")
FIRST_SAMPLE = ".body table a"
"""The list of samples has come; its filters are there before."""
TABLES = ("throughput", "weights", "data", "policies", "timeline")
PHONE = {"width": 390, "height": 844}
WIDE = {"width": 2560, "height": 1300}

PAYLOADS = (
    "<script>window.pwned=1</script>",
    "<img src=x onerror=window.pwned=1>",
    "<svg onload=window.pwned=1>",
    "<svg/onload=window.pwned=1//",
    '"><script>window.pwned=1</script>',
    "'><script>window.pwned=1</script>",
    "</script><script>window.pwned=1</script>",
    "</title><script>window.pwned=1</script>",
    "</textarea><script>window.pwned=1</script>",
    "</style><script>window.pwned=1</script>",
    "<iframe src=javascript:window.parent.pwned=1>",
    '<iframe srcdoc="<script>parent.pwned=1</script>">',
    "<body onload=window.pwned=1>",
    "<details open ontoggle=window.pwned=1>",
    "<input autofocus onfocus=window.pwned=1>",
    "<video><source onerror=window.pwned=1></video>",
    "<audio src=x onerror=window.pwned=1>",
    "<object data=javascript:window.pwned=1>",
    "<embed src=javascript:window.pwned=1>",
    "<a href=javascript:window.pwned=1>click</a>",
    "<math><mtext><style><img src=x onerror=window.pwned=1></style></mtext></math>",
    "<base href=//evil.example/>",
    "<link rel=stylesheet href=//evil.example/x.css>",
    "<meta http-equiv=refresh content='0;url=javascript:window.pwned=1'>",
    "<style>*{display:none}</style>",
    "<form action=javascript:window.pwned=1><button>go</button></form>",
    "javascript:window.pwned=1",
    "{{constructor.constructor('window.pwned=1')()}}",
    "${window.pwned=1}",
    '<noscript><p title="</noscript><img src=x onerror=window.pwned=1>">',
)


@pytest.fixture(autouse=True)
def browser() -> None:
    require_browser()


@pytest.fixture
async def recorded(world: World, tmp_path: Path) -> AsyncIterator[str]:
    await record(world, (tmp_path / "objects").as_uri())
    async with pages(world) as address:
        yield address


def picture(name: str) -> dict[str, Any]:
    folder = os.environ.get("ASTRAFLOW_PICTURES") if name in PICTURES else None
    return {"picture": str(Path(folder) / f"dashboard-{name}.png"), "settle": 400} if folder else {}


def keep_costs(seen: dict[str, Any]) -> None:
    """Put the bytes and the first paint of each page into the table of the manual."""
    costs = "".join(
        f"| {name} | {visit['transferred'] / 1000:.0f} | {visit['paint_ms']:.0f} |\n"
        for name, visit in seen.items()
    )
    said = MANUAL.read_text()
    MANUAL.write_text(re.sub(r"(?<=\n)(\| page \|.*\n\|-.*\n)(\| .*\n)+", rf"\g<1>{costs}", said, count=1))
    assert costs in MANUAL.read_text()


def require_clean(report: dict[str, Any]) -> None:
    """Nothing on the console, no violation of WCAG AA, nothing that acted, nothing wider than the screen."""
    assert report["console"] == []
    assert report["violations"] == []
    assert (report["dialogs"], report["acted"]) == ([], [])
    assert {name: seen["wide"] for name, seen in report["visits"].items() if seen["wide"] > 0} == {}


async def test_every_page_of_a_long_run_is_small_and_drawn_without_errors_and_by_wcag_aa(
    recorded: str,
) -> None:
    drawn = {tab: {"wait": DRAWN} for tab in CURVES} | {tab: {"wait": ".body .card"} for tab in TABLES}
    visits = [
        {"name": tab, "hash": f"#/run/recorded/{tab}", "settle": 200, **how, **picture(tab)}
        for tab, how in drawn.items()
    ]
    visits += [
        {"name": "runs", "hash": "#/", "wait": "table", **picture("runs")},
        {"name": "samples", "hash": "#/run/recorded/samples", "wait": FIRST_SAMPLE, **picture("samples")},
        {
            "name": "sample", "hash": "#/run/recorded/samples", "wait": FIRST_SAMPLE, "click": [FIRST_SAMPLE],
            "then": ".turns .token", "full": True, "focus": ".turns", "keys": ["ArrowDown"] * 2, **picture("sample"),
        },
        {
            "name": "found", "hash": "#/run/recorded/samples", "wait": FIRST_SAMPLE, "axe": False,
            "fill": {"[name=min_tokens]": "27", "[name=text]": "EGGS"}, "click": [".filters [type=submit]"],
            "then": ".exports a[href*=min_tokens][href*=EGGS]",
        },
        {"name": "no-sample", "hash": "#/run/recorded/sample/nonsense", "wait": ".body .empty .what", "axe": False},
        {"name": "compare", "hash": "#/compare/recorded", "wait": DRAWN, **picture("compare")},
        {"name": "dark", "hash": "#/run/recorded/progress", "wait": DRAWN, "dark": True, **picture("dark")},
        {"name": "dark-weights", "hash": "#/run/recorded/weights", "wait": "table", "dark": True},
        {"name": "phone", "hash": "#/run/recorded/progress", "wait": DRAWN, **PHONE, **picture("phone")},
        {"name": "phone-timeline", "hash": "#/run/recorded/timeline", "wait": "ol", **PHONE},
        {"name": "wide", "hash": "#/run/recorded/stability", "wait": DRAWN, **WIDE},
        {"name": "gone", "hash": "#/run/gone", "wait": "text=It was deleted"},
    ]  # fmt: skip
    report = await look(recorded, visits)
    seen = report["visits"]
    sizes = {name: visit["transferred"] for name, visit in seen.items()}
    assert max(sizes.values()) <= MAX_BYTES, sizes  # how soon it is painted is for a quiet machine
    # The browser itself tells of an answer that is an error, which is what a run that is gone gets.
    report["console"] = [line for line in report["console"] if not {"400", "404"} & set(line.split())]
    require_clean(report)
    assert "rollout-bound: the trainer waits" in seen["progress"]["text"]
    assert "63 of 64" in seen["progress"]["text"]
    assert "It was deleted, or is on another server" in seen["gone"]["text"]
    assert "(2 behind)" in seen["weights"]["text"]
    assert "Use the calculator for arithmetic." in seen["sample"]["text"]
    assert "token 20 of 27" in seen["sample"]["text"], "keys walk through tokens"
    assert ("arithmetic" in seen["found"]["text"], "word-problems" in seen["found"]["text"]) == (True, False)
    assert "nonsense" in seen["no-sample"]["text"]
    assert all("rollout-bound" in seen[name]["text"] for name in (*CURVES, *TABLES, "runs", "compare"))
    if "ASTRAFLOW_PICTURES" in os.environ:
        keep_costs(seen)


async def test_nothing_that_a_model_a_node_or_a_task_says_acts_on_the_page(
    world: World, tmp_path: Path
) -> None:
    assert len(PAYLOADS) == 30
    said = [
        (Turn("user", payload), Turn("assistant", payload), Turn("tool", payload)) for payload in PAYLOADS
    ]
    await record(
        world,
        (tmp_path / "objects").as_uri(),
        num_steps=5,
        num_nodes=30,
        samples=said,
        hostile=PAYLOADS,
    )
    async with pages(world) as address:
        waits = dict.fromkeys(TABLES, ".body .card, .body .empty") | {"samples": FIRST_SAMPLE}
        visits = [
            {"name": tab, "hash": f"#/run/recorded/{tab}", "wait": wait, "axe": False}
            for tab, wait in waits.items()
        ]
        listed = await world.dataflow.archives.of(await world.dataflow.registry.get(world.run_id))
        from astraflow.dataflow.v1.sample_service_pb2 import ListSamplesRequest

        ids = [each.sample_id for each in listed.page(ListSamplesRequest(), size=100).samples]
        visits += [
            {
                "name": f"sample-{number}",
                "hash": f"#/run/recorded/sample/{sample_id.replace('/', '%2F')}",
                "wait": ".turns .token",
                "axe": False,
            }
            for number, sample_id in enumerate(ids)
        ]
        refused = {"wait": ".empty .what", "axe": False}
        visits += [
            {"name": f"refused-{number}", "hash": f"#/run/{quote(said, safe='')}", **refused}
            for number, said in enumerate(PAYLOADS)
        ]
        report = await look(address, visits)
    report["console"] = [line for line in report["console"] if "404" not in line]
    require_clean({**report, "visits": {}})
    assert len(ids) == len(PAYLOADS)
    said_by = {name: " ".join(seen["text"].split()) for name, seen in report["visits"].items()}
    for number, payload in enumerate(PAYLOADS):
        pages_of_it = (f"sample-{number}", f"refused-{number}", "timeline", "data", "throughput", "samples")
        assert [name for name in pages_of_it if " ".join(payload.split()) not in said_by[name]] == []


def test_text_of_others_turns_nothing_around_and_breaks_no_line() -> None:
    built = "require('esbuild').buildSync({entryPoints: ['src/dom.ts'], format: 'cjs', bundle: true, write: false})"
    told = f"eval({built}.outputFiles[0].text); console.log(JSON.stringify(module.exports.plain(process.argv[1])))"
    shown = subprocess.run(
        ["node", "-e", told, HOSTILE], cwd=DASHBOARD, capture_output=True, check=True, timeout=60
    )
    expected = HOSTILE.translate({0x9B: 0xFFFD, 0x202E: 0xFFFD, 0x2067: 0xFFFD, 0x2028: 0x2424})
    assert json.loads(shown.stdout) == expected, "what is left acts on terminals, not on a page"


async def test_a_page_follows_its_run_and_says_when_the_server_was_started_anew_and_the_run_deleted(
    world: World, tmp_path: Path
) -> None:
    trainer, node = await world.started(dataset="Counting", archive="{}")
    port, steps_taken = 0, count(1)

    async def told(what: str) -> None:
        nonlocal serving, port
        if what == "train":
            step = next(steps_taken)
            await node.work(2, version=step - 1)
            batch = (await trainer.acquire(step, base_version=step - 1)).batch
            await trainer.ack(batch, TRAINED, metrics={"reward_mean": 0.5, "wait_s": 3.0, "train_s": 1.0})
            await trainer.publish(version=step, step=step)
        if what == "delete":
            await world.ask(DeleteRunResponse, force=True)
        if what == "stop":
            await serving.__aexit__(None, None, None)
        if what == "start":
            serving = pages(world, port=port)
            await serving.__aenter__()

    serving = pages(world)
    address = await serving.__aenter__()
    port = int(address.rpartition(":")[2])
    steps: list[dict[str, Any]] = [
        {"say": "train", "until": "the trainer waits 75%"},
        {"say": "stop", "until": "The server does not answer"},
        {"say": "start", "until": "The server was started anew", "forgive": True},
        {"say": "train", "grows": ".runhead .tiles dd"},
        {"say": "delete", "until": "It was deleted, or is on another server", "forgive": True},
    ]
    follow = {"hash": f"#/run/{world.run_id}/progress", "wait": ".nosteps", "steps": steps}
    report = await look(address, follow=follow, told=told)
    await serving.__aexit__(None, None, None)
    assert report["steps"] == [step.get("until", 2) for step in steps]
    require_clean(report)


async def test_a_token_that_ends_while_a_page_is_open_is_asked_for_again(
    redis_url: str, tmp_path: Path
) -> None:
    async with served(redis_url, tmp_path) as world:
        await world.started(dataset="Counting")
    async with served(redis_url, tmp_path, token_keys_file=keys_file(tmp_path)) as world:
        serving = pages(world)
        address = await serving.__aenter__()

        async def told(what: str) -> None:
            nonlocal serving
            keys_file(tmp_path, jwk(OTHER_KEY))
            await serving.__aexit__(None, None, None)
            serving = pages(world, port=int(address.rpartition(":")[2]))
            await serving.__aenter__()

        steps = [{"say": "end", "until": "This server asks for a token"}]
        follow = {"hash": "#/run/run/progress", "wait": ".nosteps", "steps": steps}
        mine = token("ada", "viewer", runs=["run"])
        report = await look(address, follow=follow, told=told, token=mine)
        await serving.__aexit__(None, None, None)
    assert report["steps"] == ["This server asks for a token"]


async def test_what_is_missing_is_said_with_its_remedy(redis_url: str, tmp_path: Path) -> None:
    async with served(redis_url, tmp_path) as world, pages(world) as address:
        nothing: dict[str, Any] = {"wait": ".empty .what"}
        empty = await look(
            address,
            [{"name": "runs", "hash": "#/"} | nothing, {"name": "compare", "hash": "#/compare"} | nothing],
        )
        await world.create_run(dataset="Counting")
        says = {tab: {"wait": ".nosteps", "axe": tab == "progress"} for tab in (*CURVES, "policies")}
        says |= {tab: {"wait": ".body .empty .what"} for tab in ("samples", "data", "throughput", "weights")}
        visits = [{"name": tab, "hash": f"#/run/run/{tab}", **how} for tab, how in says.items()]
        visits += [{"name": "compare", "hash": "#/compare/run", "wait": ".chart .empty"}]
        visits += [{"name": "gone", "hash": "#/compare/gone"} | nothing]
        missing = await look(address, visits)
    # What the browser says of an answer that is a refusal.
    missing["console"] = [line for line in missing["console"] if not {"404", "409"} & set(line.split())]
    for report in (empty, missing):
        require_clean(report)
    assert all("astraflow dev quickstart" in seen["text"] for seen in empty["visits"].values())
    said = {name: seen["text"] for name, seen in missing["visits"].items()}
    assert all("No step is finished yet" in said[tab] for tab in (*CURVES, "policies"))
    assert "dataflow: {archive: {}}" in said["samples"]
    assert "keeps no archive" in said["data"]
    assert all("astraflow raas --join" in said[tab] for tab in ("throughput", "weights"))
    assert "No finished step has this figure yet" in said["compare"]
    assert "It was deleted, or is on another server" in said["gone"]

    async with (
        served(redis_url, tmp_path, token_keys_file=keys_file(tmp_path)) as world,
        pages(world) as address,
    ):
        mine = token("ada", "viewer", runs=["other"])
        report = await look(
            address,
            [
                {"name": "runs", "hash": "#/", "wait": ".empty .what"},
                {"name": "run", "hash": "#/run/run", "wait": ".empty .what"},
                {"name": "compare", "hash": "#/compare/run", "wait": ".empty .what"},
            ],
            token=mine,
        )
    assert "no run that you may see" in report["visits"]["runs"]["text"]
    assert all("Your token is not for this" in report["visits"][name]["text"] for name in ("run", "compare"))
    assert report["violations"] == []
