"""The dashboard in a real Chromium: asks `clients/dashboard/test/browser.mjs` what it sees."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from astraflow_dataflow.dashboard.site import BUNDLE

DASHBOARD = Path(__file__).resolve().parents[2] / "clients" / "dashboard"
_CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


def require_browser() -> None:
    """Skip where there is no Chromium, or where the page is not built."""
    if _CHROMIUM is None:
        pytest.skip("no Chromium: apt-get install -y chromium")
    if not (DASHBOARD / "node_modules" / "playwright-core").is_dir() or not (BUNDLE / "app.js").is_file():
        pytest.skip("the dashboard is not built for tests: make web-tests")


async def look(
    address: str,
    visits: Sequence[Mapping[str, Any]] = (),
    *,
    token: str = "",
    entry: str = "",
    follow: Mapping[str, Any] | None = None,
    told: Callable[[str], Awaitable[None]] | None = None,
) -> dict[str, Any]:
    """Visit pages, or follow one while `told` changes what is behind it; what the browser found. It signs in by
    `token`, or by the page `entry`.
    """
    asked = {"address": address, "visits": visits, "token": token, "entry": entry, "follow": follow}
    asked["chromium"] = _CHROMIUM
    process = await asyncio.create_subprocess_exec(
        "node", str(DASHBOARD / "test" / "browser.mjs"), json.dumps(asked),
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, limit=2**24,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdin is not None
    try:
        async for raw in process.stdout:
            line = raw.decode().strip()
            if line.startswith("{"):
                report: dict[str, Any] = json.loads(line)
                return report
            assert told is not None, line
            await told(line)
            process.stdin.write(b"\n")
        raise AssertionError(f"the browser ended with status {await process.wait()}; its output is above")
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
