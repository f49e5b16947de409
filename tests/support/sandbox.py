"""Where tests of the sandbox can run: CI installs bubblewrap, elsewhere they are skipped and say so."""

import os
import shutil

import pytest

needs_bubblewrap = pytest.mark.skipif(
    shutil.which("bwrap") is None and os.environ.get("CI") != "true",
    reason="needs bubblewrap (apt install bubblewrap); .ci/run installs it",
)
