"""`astraflow --help` answers at once: the command line loads a heavy library only when a subcommand runs."""

import json
import subprocess
import sys

import pytest

HEAVY = ("boto3", "fastapi", "grpc", "numpy", "pydantic", "redis", "torch", "transformers")
IMPORT_PACKAGE = "import astraflow"
IMPORT_CLI = "import astraflow.cli"
RUN_HELP = """
from astraflow.cli import main
sys.argv = ["astraflow", "--help"]
try:
    main()
except SystemExit as ended:
    assert not ended.code, ended.code
"""


@pytest.mark.parametrize("code", [IMPORT_PACKAGE, IMPORT_CLI, RUN_HELP], ids=["package", "cli", "help"])
def test_nothing_heavy_is_loaded(code: str) -> None:
    ask = f"print(json.dumps([name for name in {HEAVY!r} if name in sys.modules]), file=sys.stderr)"
    command = [sys.executable, "-c", f"import json, sys\n{code}\n{ask}"]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr
    assert json.loads(finished.stderr.splitlines()[-1]) == []
