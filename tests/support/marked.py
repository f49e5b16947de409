"""Processes that are known by a variable which they inherited, whoever is their parent by now."""

from contextlib import suppress

import psutil


def alive_with(mark: str) -> list[psutil.Process]:
    """Those that run with this value of MARK."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get("MARK") == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found
