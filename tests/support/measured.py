"""What a module of the tests measures of itself in a process of its own."""

import json
import os
import subprocess
import sys
from typing import Any

from support.source_tree import REPOSITORY


def measured(module: str, *arguments: str) -> Any:
    """What `python -m MODULE ARGUMENTS` prints, as JSON."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path, str(REPOSITORY / "tests")])}
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True, timeout=580)
    return json.loads(done.stdout)
