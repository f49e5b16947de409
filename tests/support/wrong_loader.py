"""An engine that loads something else than it is told: a real one behind a door that swaps the folder of an update.

What it answers is what those weights answer, under the name of the version it was told.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from support.misbehaving_engine import MisbehavingEngine, misbehaving_engine

_ASKED = frozenset({"/model_info", "/server_info", "/health_generate"})


@dataclass
class WrongLoader(MisbehavingEngine):
    """Passes everything on to `behind`."""

    behind: str = ""
    wrong: Path = Path()
    num_wrong_loads: int = 0
    """So many of the next updates load `wrong`."""

    async def _answer(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        if path == "/update_weights_from_disk" and self.num_wrong_loads:
            self.num_wrong_loads -= 1
            body = body | {"model_path": str(self.wrong)}
        async with httpx.AsyncClient(base_url=self.behind, timeout=60.0, trust_env=False) as client:
            method = "GET" if path in _ASKED else "POST"
            response = await client.request(method, path, json=None if method == "GET" else body)
        is_json = "json" in response.headers.get("content-type", "")
        return response.status_code, response.json() if is_json else response.text


@asynccontextmanager
async def wrong_loader(behind: str, *, wrong: Path) -> AsyncIterator[WrongLoader]:
    """One in front of the engine at `behind`, which can load the folder `wrong`."""
    async with misbehaving_engine(WrongLoader, behind=behind, wrong=wrong) as door:
        assert isinstance(door, WrongLoader)
        yield door
