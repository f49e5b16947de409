"""Every client does what the table of cases says, against a real dataflow server.

A language takes part when its driver can be started; one that cannot is skipped by name.
"""

import asyncio
import json
import re
import shutil
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from astraflow.errors import ERRORS_BY_REASON
from astraflow.join import JoinString, format_join
from astraflow_launcher.issuing.tokens import read_authorities
from conformance.servers import ProcessServer, WorldServer, scripted_server
from conformance.suite import CASES, Case, Driver, Server, Suite, cases, difference, filled
from support.dataflow_process import DataflowProcess
from support.dataflow_world import recipe_text, served
from support.source_tree import REPOSITORY
from support.tls import Authority
from support.tokens import keys_file, token

pytestmark = [pytest.mark.integration, pytest.mark.ci]

CLIENTS = REPOSITORY / "clients"
COMMANDS = {
    "python": [sys.executable, str(CASES.parent / "python_driver.py")],
    "typescript": ["node", str(CLIENTS / "typescript" / "dist" / "conformance" / "driver.js")],
    "go": [str(CLIENTS / "go" / "build" / "driver")],
    "cpp": [str(CLIENTS / "cpp" / "build" / "driver")],
}
BUILDS = {
    "typescript": "`make typescript` needs node and npm",
    "go": "`make go` needs the packages of Debian that clients/go/README.md names",
    "cpp": "`make cpp` needs the packages of Debian that clients/cpp/README.md names",
}
MISSING = json.loads((CASES.parent / "missing.json").read_text())
"""Language → case → why its client does not do it. A case that is listed and passes is an error."""
VARIABLES = {
    "recipe": recipe_text(),
    "other_recipe": recipe_text(group_size=4),
    "solo_recipe": recipe_text(name="solo", group_size=1),
    "short_leases": recipe_text(lease_ttl_s=0.5),
    "two_attempts": recipe_text(max_attempts=2),
    "counting_recipe": recipe_text(dataset="Counting"),
    **{f"{role}_token": token(f"a-{role}", role) for role in ("operator", "viewer", "rollout")},
}


@pytest.fixture(scope="module", params=COMMANDS)
def driver(request: pytest.FixtureRequest) -> Iterator[Driver]:
    """The driver of one language."""
    program, built = COMMANDS[request.param][0], COMMANDS[request.param][-1]
    if not (shutil.which(program) and Path(built).exists()):
        pytest.skip(f"the client in {request.param} is not built here: {BUILDS[request.param]}")
    driver = Driver(COMMANDS[request.param], language=request.param)
    yield driver
    driver.close()


@pytest.fixture
async def server(case: Case, request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Server | None]:
    """What the case talks to, fresh for it."""
    if case.server == "none":
        yield None
    elif case.server == "scripted":
        async with scripted_server() as scripted:
            yield scripted
    elif case.server == "process":
        process: DataflowProcess = request.getfixturevalue("process")
        process.start()
        yield ProcessServer(process)
    elif case.server == "tls":
        authority = Authority.create(tmp_path / "ca")
        pair, stranger = authority.server(), Authority.create(tmp_path / "stranger")
        files = {"tls_cert_file": pair.certificate, "tls_key_file": pair.key}
        async with served(
            request.getfixturevalue("redis_url"), tmp_path, token_keys_file=keys_file(tmp_path), **files
        ) as world:
            yield WorldServer(world, join_strings(world.address, authority, stranger))
    else:
        tokens = {"token_keys_file": keys_file(tmp_path)} if case.server == "tokens" else {}
        async with served(request.getfixturevalue("redis_url"), tmp_path, **tokens) as world:
            yield WorldServer(world)


def join_strings(address: str, authority: Authority, stranger: Authority) -> dict[str, str]:
    """Join strings for an operator: one that is right, and one for each way in which it cannot be."""
    ours, theirs = (read_authorities(each.folder / "ca.pem") for each in (authority, stranger))
    operator = token("an-operator", "operator")
    right = {"address": address, "ca": ours, "token": operator}
    parts: dict[str, dict[str, Any]] = {
        "join": {},
        "join_by_name": {"server_name": "localhost"},
        "join_of_another_authority": {"ca": theirs},
        "join_of_a_public_authority": {"ca": (), "public_ca": True},
        "join_by_another_name": {"server_name": "inside.example"},
        "join_with_an_expired_token": {"token": token("an-operator", "operator", exp=1)},
        "join_without_a_token": {"token": ""},
    }
    return {name: format_join(JoinString(**{**right, **other})) for name, other in parts.items()}


@pytest.mark.parametrize("case", cases(), ids=str)
async def test_a_client_does(
    case: Case, driver: Driver, server: Server | None, request: pytest.FixtureRequest
) -> None:
    why = MISSING.get(driver.language, {}).get(case.name)
    if why is not None:
        request.applymarker(pytest.mark.xfail(reason=why, raises=AssertionError, strict=True))
    said = server.variables if isinstance(server, WorldServer) else {}
    await Suite(driver, server, {**VARIABLES, **said}).run(case)


def test_what_a_client_does_not_do_is_named_as_its_case_is() -> None:
    assert set(MISSING) <= set(COMMANDS) - {"python", "typescript"}
    assert {name for missing in MISSING.values() for name in missing} <= {case.name for case in cases()}


async def test_the_python_program_of_the_page_finishes_a_task(redis_url: str, tmp_path: Path) -> None:
    page = (REPOSITORY / "docs" / "clients.md").read_text()
    program, *_ = re.findall(r"```python\n(.*?)```", page, re.S)
    async with served(redis_url, tmp_path) as world:
        _, node = await world.started()
        command = [sys.executable, "-c", program, world.address]
        running = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        await node.work()
        printed, _ = await asyncio.wait_for(running.communicate(), 60)
    assert printed == b"[0.0, 1.0]\n"


def test_every_reason_of_an_error_has_a_case() -> None:
    table = json.loads((CASES / "errors.json").read_text())
    named = {row["reason"] for case in table["cases"] for row in case.get("each", ())}
    assert set(ERRORS_BY_REASON) <= named


@pytest.mark.parametrize(
    ("expected", "found", "is_so"),
    [
        ({"a": 1}, {"a": 1, "b": 2}, True),
        ({"a": {"b": [1]}}, {"a": {"b": [1, 2]}}, False),
        ({"a": {"$absent": True}}, {}, True),
        ({"a": {"$has": "x"}}, {"a": "yxz"}, True),
        ({"a": {"$at_least": 2}}, {"a": 1}, False),
        ({"$any_order": [{"a": 1}, {"a": 2}]}, [{"a": 2}, {"a": 1}], True),
        ({"$any_order": [1, 1]}, [1, 2], False),
        (True, 1.0, True),
        ("1", 1, False),
    ],
)
def test_a_wrong_answer_is_seen(expected: object, found: object, is_so: bool) -> None:
    assert (difference(expected, found, at="reply") is None) == is_so


def test_variables_keep_their_type_and_fill_texts() -> None:
    assert filled(["$n", "a${n}"], {"n": 3}) == [3, "a3"]
