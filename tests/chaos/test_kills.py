"""The loop survives every kill of the matrix: whatever died came back, and the audit finds nothing wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from support.audit import Audit, audit
from support.chaos import Kill, Story, run_kills

from .kill_matrix import MATRIX

pytestmark = [pytest.mark.e2e, pytest.mark.ci, pytest.mark.timeout(600)]

CELLS = [pytest.param(run, kill, id=f"{run}: {kill}") for run, kills in MATRIX.items() for kill in kills]
