"""Who reads a daemon's pages, over what, and what probes are told."""

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from astraflow_kit.identity.certificates import ServerCertificate
from astraflow_kit.lifecycle import Lifecycle
from astraflow_kit.metrics import Metrics
from astraflow_kit.pages import Pages
from astraflow_kit.settings import DaemonSettings
from support.certificates import self_signed
from support.tokens import keys_file, token


async def _status() -> Mapping[str, object]:
    return {"step": 3}


async def _unready() -> str:
    return "waiting for version"


@asynccontextmanager
async def serving(
    settings: DaemonSettings, *, run_id: str = "", life: Lifecycle | None = None
) -> AsyncIterator[Pages]:
    life = life or Lifecycle(drain_timeout_s=1)
    pages = Pages(
        settings,
        life=life,
        metrics=Metrics(),
        status=_status,
        readiness={"policies": _unready},
        run_id=run_id,
    )
    await pages.start()
    running = asyncio.create_task(pages.run())
    try:
        yield pages
    finally:
        await pages.stop(deadline_s=2)
        await asyncio.wait_for(running, 60)


async def asked(address: str, path: str, sent: str = "", *, host: str | None = None) -> httpx.Response:
    """The answer to somebody with this token, who asks for this host."""
    headers = {"authorization": f"Bearer {sent}"} if sent else {}
    if host is not None:
        headers["host"] = host
    async with httpx.AsyncClient(base_url=f"http://{address}", timeout=10, headers=headers) as client:
        return await client.get(path)


VIEWER, OTHERS = token("v", "viewer"), token("o", "viewer", runs=["other"])
READERS = [
    ("", "/status", "", 401, "missing"),
    ("", "/status", "forged", 401, "malformed"),
    ("", "/status", token("n", "rollout"), 403, "role"),
    ("", "/status", OTHERS, 200, None),
    ("", "/metrics", OTHERS, 403, "run"),
    ("", "/metrics", VIEWER, 200, None),
    ("run", "/status", OTHERS, 403, "run"),
    ("run", "/metrics", token("r", "operator", runs=["run"]), 200, None),
    ("", "/openapi.json", "", 401, "missing"),
    ("", "/healthz", "", 200, None),
    ("", "/readyz", "", 503, None),
]


@pytest.mark.parametrize(("run_id", "path", "sent", "status", "reason"), READERS)
async def test_pages_are_for_those_whose_token_says_so(
    tmp_path: Path, run_id: str, path: str, sent: str, status: int, reason: str | None
) -> None:
    async with serving(DaemonSettings(token_keys_file=keys_file(tmp_path)), run_id=run_id) as pages:
        answer = await asked(pages.address, path, sent)
    assert answer.status_code == status
    if reason:
        assert answer.json()["reason"] == reason
    assert (answer.headers.get("www-authenticate") == "Bearer") == (status == 401)


async def test_probes_have_a_listener_of_their_own_that_tells_nothing_else(tmp_path: Path) -> None:
    life = Lifecycle(drain_timeout_s=1)
    settings = DaemonSettings(probe_port=0, token_keys_file=keys_file(tmp_path), **self_signed(tmp_path))  # type: ignore[arg-type]
    async with serving(settings, life=life) as pages:
        paths = ("/healthz", "/startedz", "/readyz", "/status", "/metrics", "/docs", "/openapi.json")
        before = [(await asked(pages.probe_address, path)).status_code for path in paths]
        life.started.set()
        started = await asked(pages.probe_address, "/startedz")
    assert before == [200, 503, 503, 404, 404, 404, 404]
    assert started.status_code == 200


async def test_pages_speak_tls_1_3_and_show_a_replaced_certificate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("astraflow_kit.identity.watched.LOOK_EVERY_S", 0.0)
    async with serving(DaemonSettings(**self_signed(tmp_path))) as pages:  # type: ignore[arg-type]
        for name in ("first", "second"):
            trusted = ssl.create_default_context(
                cafile=str(self_signed(tmp_path, name=name)["tls_cert_file"])
            )
            async with httpx.AsyncClient(base_url=f"https://{pages.address}", verify=trusted) as client:
                assert (await client.get("/status")).json() == {"step": 3}
        trusted.minimum_version, trusted.maximum_version = ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_2
        async with httpx.AsyncClient(base_url=f"https://{pages.address}", verify=trusted) as old:
            with pytest.raises(httpx.ConnectError):
                await old.get("/status")


def test_pages_forget_a_client_whose_authority_was_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("astraflow_kit.identity.watched.LOOK_EVERY_S", 0.0)
    pairs = {}
    for name in ("server", "old", "new"):
        (tmp_path / name).mkdir()
        pairs[name] = self_signed(tmp_path / name)
    in_force = tmp_path / "clients.pem"
    in_force.write_bytes(pairs["old"]["tls_cert_file"].read_bytes())
    settings = DaemonSettings(**pairs["server"], tls_client_ca_file=in_force)  # type: ignore[arg-type]
    context = ServerCertificate(settings).ssl_context()
    client = ssl.create_default_context(cafile=str(pairs["server"]["tls_cert_file"]))
    client.load_cert_chain(pairs["old"]["tls_cert_file"], pairs["old"]["tls_key_file"])
    session = shaken(context, client, None)
    in_force.write_bytes(pairs["new"]["tls_cert_file"].read_bytes())
    for resumed in (None, session):
        with pytest.raises(ssl.SSLError):
            shaken(context, client, resumed)


def shaken(
    server: ssl.SSLContext, client: ssl.SSLContext, resumed: ssl.SSLSession | None
) -> ssl.SSLSession | None:
    """Shake hands, and say a word to each other; what the client could resume."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ours = server.wrap_bio(to_server, to_client, server_side=True)
    theirs = client.wrap_bio(to_client, to_server, server_hostname="localhost", session=resumed)
    steps = [theirs.do_handshake, ours.do_handshake, theirs.do_handshake, ours.do_handshake]
    steps += [lambda: ours.write(b"hello"), lambda: theirs.read(5)]  # type: ignore[list-item]
    for step in steps:
        with contextlib.suppress(ssl.SSLWantReadError):
            step()
    return theirs.session


@pytest.mark.parametrize(
    ("host", "path", "status"),
    [
        ("localhost:80", "/status", 200),
        ("127.0.0.1", "/metrics", 200),
        ("[::1]:7071", "/status", 200),
        ("10.1.2.3:7071", "/status", 200),
        ("LOCALHOST.", "/status", 200),
        ("astraflow.example", "/status", 200),
        ("evil.example", "/status", 421),
        ("evil.example:7071", "/metrics", 421),
        ("localhost.evil.example", "/status", 421),
        ("localhost@evil.example", "/status", 421),
        ("[::1", "/status", 421),
        ("", "/status", 421),
        ("evil.example", "/nowhere", 421),
        ("evil.example", "/healthz", 200),
        ("evil.example", "/readyz", 503),
    ],
)
async def test_pages_answer_by_names_of_theirs_only_and_probes_by_any(
    host: str, path: str, status: int
) -> None:
    async with serving(DaemonSettings(http_allowed_hosts=("astraflow.example",))) as pages:
        answer = await asked(pages.address, path, host=host)
    assert answer.status_code == status
    assert ("http_allowed_hosts" in answer.text) == (status == 421)


async def test_a_star_allows_every_name() -> None:
    async with serving(DaemonSettings(http_allowed_hosts=("*",))) as pages:
        assert (await asked(pages.address, "/status", host="any.example")).status_code == 200


async def test_without_keys_pages_need_no_token() -> None:
    async with serving(DaemonSettings()) as pages:
        assert (await asked(pages.address, "/status")).json() == {"step": 3}
        assert pages.probe_address == ""
