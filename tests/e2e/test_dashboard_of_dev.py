"""The dashboard of a real `astraflow dev`, as a browser opens it: signed in by the run's own file, it follows the
steps, and says so when its server hangs.
"""

import re
import signal
from pathlib import Path

import pytest

from support.chromium import look, require_browser
from support.development import RUN_ID, RunFiles, dev, wait_for

pytestmark = [pytest.mark.ci, pytest.mark.e2e, pytest.mark.timeout(300)]

STEP = ".runhead .tiles dd"
"""The first figure of a run."""


DRAWN, FILLED = ".plot:not([hidden]) canvas", ".body .card"
PAGES = {
    **dict.fromkeys(("stability", "freshness", "trainer"), DRAWN),
    **dict.fromkeys(("throughput", "weights", "data", "policies", "timeline"), FILLED),
    "samples": ".body table a, .body .empty .what",
}
"""The other tabs, and what is there once they are filled."""
STEPS = [{"say": "steps", "grows": STEP}]
AND_HANGS = [
    {"say": "SIGSTOP", "until": "The server has answered nothing"},
    {"say": "SIGCONT", "grows": STEP},
]


@pytest.mark.parametrize(
    "steps",
    [pytest.param(STEPS, id="steps"), pytest.param(STEPS + AND_HANGS, id="hangs", marks=pytest.mark.soak)],
)
async def test_the_page_that_dev_names_signs_in_and_follows_the_steps(
    tmp_path: Path, steps: list[dict[str, str]]
) -> None:
    require_browser()
    files = RunFiles(tmp_path)

    async def told(what: str) -> None:
        """The server hangs, or goes on; else the run goes on by itself."""
        if what.startswith("SIG"):
            for process in files.processes("-m astraflow_dataflow"):
                process.send_signal(signal.Signals[what])

    with dev(tmp_path, "--steps", "1000", "--no-open", "--set", "dataflow.archive={}"):
        wait_for(lambda: files.steps_taken() >= 2)
        address, entry = re.findall(
            r"dashboard: http://(\S+)/, signed in by (\S+);", files.stderr.read_text()
        )[0]
        report = await look(
            address,
            entry=entry,
            visits=[
                {"name": "runs", "hash": "#/", "wait": "table", "axe": False},
                {"name": "shape", "hash": f"#/run/{RUN_ID}/shape", "wait": "canvas", "settle": 500},
                *(
                    {"name": tab, "hash": f"#/run/{RUN_ID}/{tab}", "wait": wait, "axe": False}
                    for tab, wait in PAGES.items()
                ),
                {"name": "compare", "hash": f"#/compare/{RUN_ID}", "wait": DRAWN, "axe": False},
            ],
            follow={"hash": f"#/run/{RUN_ID}/progress", "wait": "canvas", "steps": steps},
            told=told,
        )
    assert report["console"] == []
    assert report["violations"] == []
    shown = [step for step in report["steps"] if isinstance(step, int)]
    assert len(report["steps"]) == len(steps)
    assert 2 < shown[0] <= shown[-1]
    # The run's own figures, not those of a record.
    texts = {name: seen["text"] for name, seen in report["visits"].items()}
    assert "Turns an episode" in texts["shape"]
    assert "node-1" in texts["weights"]
    assert all(RUN_ID in text for text in texts.values())
