"""Pages as a pipe gets them."""

import io

from rich.console import Console, RenderableType


def printed(page: RenderableType, *, width: int = 160) -> str:
    """The text of a page on a terminal of this width without colours."""
    output = io.StringIO()
    Console(file=output, width=width, highlight=False).print(page)
    return output.getvalue()
