"""Links of the manual that lead out of `docs/`, to code and recipes, lead to the repository on the site.

A hook of mkdocs. That such links lead to files is checked with the tree, so nothing is checked here.
"""

import posixpath
import re
from typing import Any

OUTSIDE = re.compile(r"(?<=\]\()((?:\.\./)+)([^)#\s]+)")


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: object) -> str:
    """Return the page with such links."""
    folder = posixpath.dirname(page.file.src_uri)

    def rewritten(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join("docs", folder, link[1] + link[2]))
        inside = target == "docs" or target.startswith("docs/")
        return link[0] if inside else f"{config.repo_url}/blob/main/{target}"

    return OUTSIDE.sub(rewritten, markdown)
