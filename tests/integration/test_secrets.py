"""Planted secrets are looked for in everything that a deployment writes and answers, and found nowhere."""

import json
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
from redis.asyncio import Redis

from astraflow.client import AsyncClient, Connection, RetryPolicy
from astraflow.dataflow.v1 import admin_service_pb2 as admin
from astraflow.dataflow.v1 import run_service_pb2 as runs
from astraflow.dataflow.v1 import task_service_pb2 as tasks
from astraflow.errors import AstraflowError
from astraflow.join import JoinString, format_join
from astraflow_dataflow.store.keys import Keys
from astraflow_kit.lifecycle import read_address_file
from astraflow_launcher.support.bundle import Evidence, save_bundle
from support.archives import content
from support.dataflow_process import DataflowProcess
from support.tokens import OTHER_KEY, keys_file, token

pytestmark = [pytest.mark.integration, pytest.mark.slow]

PASSWORD, S3_KEY = "redis-pw-7Qx1", "s3+secret/Zk93hJ"
OPERATOR = token("ops", "operator")
REFUSED = [token("late", "operator", exp=1), token("forger", "operator", key=OTHER_KEY), token("v", "viewer")]


async def refused_calls(address: str) -> list[str]:
    """What the server says to calls that carry secrets where they belong, and where they do not."""
    said = []
    for sent in (OPERATOR, *REFUSED):
        async with AsyncClient(Connection(address, token=sent), retry=RetryPolicy(total_s=0)) as client:
            for rpc, request in (
                (client.runs.DeleteRun, runs.DeleteRunRequest(run_id="nowhere")),
                (client.admin.Why, admin.WhyRequest(run_id="nowhere", task_id="t")),
            ):
                try:
                    await client.call(rpc, request)
                except AstraflowError as error:
                    said.append(f"{error.message} {error.metadata}")
    return said


async def pages_of(address: str) -> list[str]:
    """Every page, with a token and without."""
    found = []
    for sent in (OPERATOR, *REFUSED):
        headers = {"authorization": f"Bearer {sent}"}
        async with httpx.AsyncClient(base_url=f"http://{address}", headers=headers) as client:
            found += [
                (await client.get(path)).text for path in ("/status", "/metrics", "/readyz", "/nowhere")
            ]
    return found


def failed_start(folder: Path) -> str:
    """What a server says that cannot reach its Redis, whose URL holds the password."""
    url = f"redis://admin:{PASSWORD}@127.0.0.1:1/0"
    command = [
        sys.executable,
        "-m",
        "astraflow_dataflow",
        "--redis",
        url,
        "--work-dir",
        str(folder),
        "--check",
    ]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert ended.returncode != 0
    return ended.stdout + ended.stderr


async def test_no_planted_secret_is_written_or_answered_anywhere(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    join = format_join(JoinString(address="dataflow.example:7070", token=OPERATOR, public_ca=True))
    monkeypatch.setenv("ASTRAFLOW_TOKEN_KEYS_FILE", str(keys_file(tmp_path)))
    monkeypatch.setenv("ASTRAFLOW_JOIN", join)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", S3_KEY)
    (folder := tmp_path / "run").mkdir()
    process = DataflowProcess(redis_url, folder)
    process.start()
    try:
        addresses = read_address_file(folder / "address.json")
        assert addresses is not None
        written = [
            *await refused_calls(process.address),
            *await pages_of(addresses.http),
            failed_start(folder),
        ]
        evidence = Evidence(
            folders=(folder,),
            server=Connection(process.address, token=OPERATOR),
            note=f"joined with {join}, AWS_SECRET_ACCESS_KEY={S3_KEY}, Bearer {OPERATOR}",
        )
        with suppress(AstraflowError):
            save_bundle(evidence, tmp_path / "bundle.tar.gz")
    finally:
        process.kill()
    packed = {
        name: held.decode(errors="replace") for name, held in content(tmp_path / "bundle.tar.gz").items()
    }
    written += [process.log(), *packed.values()]
    secrets = {PASSWORD, S3_KEY, join, *(made.rpartition(".")[2] for made in (OPERATOR, *REFUSED))}
    for text in written:
        assert [secret for secret in secrets if secret in text] == [], text
    assert any("***" in text for text in packed.values()), "nothing that was planted came so far"
    assert len(json.dumps(written)) > 5_000


async def test_neither_a_run_s_key_nor_what_it_sealed_is_written_or_answered(
    redis_url: str, tmp_path: Path
) -> None:
    (folder := tmp_path / "run").mkdir()
    process = DataflowProcess(redis_url, folder)
    process.start()
    try:
        async with process.world() as world, Redis.from_url(redis_url, decode_responses=True) as redis:
            trainer, node, _ = await world.bound()
            key = await redis.hget(Keys("run").of("run"), "seal_key")
            sealed = [said.rpartition("/")[2] for said in (trainer.credential, node.credential)]
            written = [str(said) for said in (await world.status(), await world.why())]
            written.append(str(await world.ask(runs.ListRunsResponse)))
            for forged in (
                f"{node.credential}0",
                trainer.credential,
                f"{node.credential.rpartition('/')[0]}/{key}",
            ):
                with pytest.raises(AstraflowError) as refused:
                    await world.ask(tasks.LeaseTasksResponse, as_=forged, max_tasks=1)
                written.append(f"{refused.value.message} {refused.value.metadata}")
        addresses = read_address_file(folder / "address.json")
        assert addresses is not None
        written += await pages_of(addresses.http)
        with suppress(AstraflowError):
            evidence = Evidence(
                folders=(folder,), server=Connection(process.address), note=f"as {node.credential}"
            )
            save_bundle(evidence, tmp_path / "bundle.tar.gz")
    finally:
        process.kill()
    packed = content(tmp_path / "bundle.tar.gz").values()
    written += [process.log(), *(held.decode(errors="replace") for held in packed)]
    assert len({key, *sealed}) == 3
    for text in written:
        assert [secret for secret in (key, *sealed) if secret in text] == [], text
