"""Who dials a server with TLS and tokens: what joins, and what is said about everything that does not."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from astraflow.client import AsyncClient, Connection
from astraflow.dataflow.v1 import run_pb2, run_service_pb2
from astraflow.errors import AstraflowError, UnauthenticatedError
from astraflow.join import JoinString, format_join
from astraflow_kit.lifecycle import ExitCode, exit_code_of
from astraflow_kit.settings import load
from astraflow_launcher.issuing.keys import create_keys
from astraflow_launcher.issuing.tokens import Grant, issue_token, read_authorities
from astraflow_raas import server as raas
from astraflow_raas.settings import NodeSettings
from astraflow_trainer import server as trainer
from astraflow_trainer.settings import TrainerSettings
from support import cli
from support.dataflow_world import World, recipe_text, served, until
from support.node_process import node_of
from support.tls import Authority

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]


@dataclass(frozen=True)
class Secured:
    """A server with TLS and tokens, a run on it, and who issues for it."""

    world: World
    authority: Authority
    key: Path
    folder: Path

    def token(self, *, hours: float = 0.0, **grant: Any) -> str:
        """A token that was issued `hours` from now for one hour; a node's for the run unless `grant` differs."""
        usual = {"role": "rollout", "runs": ("run",), "subject": "node"}
        now = datetime.now(UTC) + timedelta(hours=hours)
        return issue_token(Grant(**{**usual, **grant}), ttl=timedelta(hours=1), key=self.key, now=now)

    def join_file(self, token: str, /, **parts: Any) -> str:
        """The path of a join string for the server."""
        ca = read_authorities(self.authority.folder / "ca.pem")
        join = JoinString(**{"address": self.world.address, "ca": ca, "token": token, **parts})
        path = self.folder / "join"
        path.write_text(format_join(join))
        return str(path)


@pytest.fixture
async def secured(redis_url: str, tmp_path: Path) -> AsyncIterator[Secured]:
    authority, key = Authority.create(tmp_path / "ca"), tmp_path / "signing.pem"
    pair, public = authority.server(), create_keys(key)
    tls = {"tls_cert_file": pair.certificate, "tls_key_file": pair.key, "token_keys_file": public}
    async with served(redis_url, tmp_path, **tls) as world:
        made = Secured(world, authority, key, tmp_path)
        operator = made.token(role="operator", runs=("*",))
        async with AsyncClient(Connection(world.address, ca=authority.pem, token=operator)) as client:
            run = run_pb2.Run(
                run_id="run", recipe_yaml=recipe_text(name="run"), store_uri=(tmp_path / "store").as_uri()
            )
            await client.call(client.runs.CreateRun, run_service_pb2.CreateRunRequest(run=run))
            yield made


async def node_check(options: Mapping[str, Any], folder: Path) -> None:
    await raas.check(load(NodeSettings, {**options, "work_dir": folder / "raas"}))


async def trainer_check(options: Mapping[str, Any], folder: Path) -> None:
    await asyncio.to_thread(trainer.check, load(TrainerSettings, {**options, "work_dir": folder / "trainer"}))


async def test_a_join_file_is_all_that_a_node_and_a_trainer_need(secured: Secured) -> None:
    await node_check({"join_file": secured.join_file(secured.token())}, secured.folder)
    await trainer_check({"join_file": secured.join_file(secured.token(role="trainer"))}, secured.folder)
    viewer = secured.join_file(secured.token(role="viewer"))
    shown = await asyncio.to_thread(cli.run, "status", "--join-file", viewer, "--run-id", "run", "--json")
    assert (shown.status, shown.json["run_id"]) == (0, "run")


async def test_the_parts_of_a_join_string_can_be_given_one_by_one(secured: Secured) -> None:
    (secured.folder / "token").write_text(secured.token())
    files = {"token_file": secured.folder / "token", "ca_file": secured.authority.folder / "ca.pem"}
    await node_check({"join": secured.world.address, **files}, secured.folder)
    await node_check({"join": secured.world.address, "server_name": "localhost", **files}, secured.folder)


async def test_a_revoked_token_is_refused_from_then_on(secured: Secured) -> None:
    node = secured.join_file(secured.token())
    operator = secured.folder / "operator"
    operator.write_text(secured.token(role="operator", runs=("*",)))
    how = ("--join", secured.world.address, "--ca-file", f"{secured.authority.folder}/ca.pem")
    revoked = await asyncio.to_thread(cli.run, "token", "revoke", node, *how, "--token-file", f"{operator}")
    assert (revoked.status, "is refused by every server" in revoked.output) == (0, True), revoked.errors

    async def refused() -> bool:
        with contextlib.suppress(UnauthenticatedError):
            await node_check({"join_file": node}, secured.folder)
            return False
        return True

    await until(refused)


@dataclass(frozen=True)
class Row:
    """How the join string differs, and what is said about it."""

    says: tuple[str, ...]
    grant: Mapping[str, Any] = field(default_factory=dict)
    parts: Callable[[Secured], Mapping[str, Any]] = lambda _: {}


def of_a_stranger(secured: Secured) -> Mapping[str, Any]:
    stranger = Authority.create(secured.folder / "stranger")
    return {"ca": read_authorities(stranger.folder / "ca.pem")}


ROWS = {
    "another authority": Row(("UNTRUSTED_SERVER", "given authority", "join string"), parts=of_a_stranger),
    "another name": Row(
        ("UNTRUSTED_SERVER", "'inside.example'", "--server-name"),
        parts=lambda _: {"server_name": "inside.example"},
    ),
    "no token": Row(("UNAUTHENTICATED", "--token-file"), parts=lambda _: {"token": ""}),
    "an expired token": Row(("UNAUTHENTICATED", "expired", "--token-file"), {"hours": -2}),
    "a clock that is an hour ahead": Row(("UNAUTHENTICATED", "clock"), {"hours": 1}),
    "another audience": Row(("UNAUTHENTICATED", "elsewhere"), {"audience": "elsewhere"}),
    "another run": Row(("'run'",), {"runs": ("other",)}),
    "another role": Row(("PERMISSION_DENIED", "role agent"), {"role": "agent"}),
}


@pytest.mark.parametrize("case", ROWS)
@pytest.mark.parametrize("dial", [node_check, trainer_check])
async def test_whoever_cannot_be_trusted_is_named_and_not_started_again(
    secured: Secured, dial: Callable[[Mapping[str, Any], Path], Any], case: str
) -> None:
    row = ROWS[case]
    join_file = secured.join_file(secured.token(**row.grant), **row.parts(secured))
    with pytest.raises(AstraflowError) as error:
        await dial({"join_file": join_file, "run_id": "run"}, secured.folder)
    said = f"{error.value.reason}: {error.value.message}"
    # A trainer's remedy is the server's sentence.
    missing = [
        text
        for text in row.says
        if text not in said and not (dial is trainer_check and text.startswith("--t"))
    ]
    assert (missing, exit_code_of(error.value)) == ([], ExitCode.USAGE), said
    assert secured.token().rpartition(".")[2] not in said


async def test_tls_on_one_side_only_is_named_at_once(secured: Secured, redis_url: str) -> None:
    plain = {"join": secured.world.address}
    for dial in (node_check, trainer_check):
        with pytest.raises(AstraflowError, match="speaks TLS, and this side does not say whom it trusts"):
            await dial(plain, secured.folder)
    async with served(redis_url, secured.folder) as world:
        join_file = secured.join_file("", address=world.address)
        for dial in (node_check, trainer_check):
            with pytest.raises(AstraflowError, match="does not speak TLS"):
                await dial({"join_file": join_file}, secured.folder)


async def test_a_node_ends_with_status_2_and_waits_for_nothing(secured: Secured) -> None:
    join_file = secured.join_file(secured.token(hours=-2))
    async with node_of("", secured.folder, "--join-file", join_file) as node:
        assert await node.ends_with() == ExitCode.USAGE
    (failed,) = node.events("daemon.failed")
    assert "expired" in str(failed["message"])
