"""The way into a run's dashboard: a file of its owner's that signs a browser in, so that no address holds a token.

The file holds the token of a viewer in a form and sends it to the run's own server; it is made anew at each start, like
the tokens. Called by `development_run`.
"""

import html
import os
import sys
import webbrowser
from pathlib import Path

from astraflow_kit.log import get_logger
from astraflow_launcher.issuing.secret_files import write_file

log = get_logger(__name__)

_PAGE = """<!doctype html><html lang="en"><meta charset="utf-8"><title>AstraFlow</title>
<body onload="document.forms[0].submit()"><form method="post" action="http://{address}/login">
<input type="hidden" name="token" value="{token}"><button>Open the dashboard</button></form></body></html>
"""


def write_page(path: Path, *, address: str, token: Path) -> None:
    """Write the file, readable by its owner only."""
    held = html.escape(token.read_text().strip())
    write_file(path, _PAGE.format(address=html.escape(address), token=held).encode())


def has_screen() -> bool:
    """Whether somebody sits at a terminal of this machine and can be shown a page."""
    shows = sys.platform == "darwin" or os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    return sys.stderr.isatty() and bool(shows) and not os.environ.get("SSH_CONNECTION")


def open_page(path: Path) -> None:
    """Show the file in a browser; without one nothing happens."""
    try:
        webbrowser.open(path.as_uri())
    except webbrowser.Error as error:
        log.info("dashboard.not_opened", path=str(path), error=str(error))
