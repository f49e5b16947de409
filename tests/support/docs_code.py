"""The code that documentation shows, so that tests run what readers copy."""

import re
from pathlib import Path

from support.source_tree import REPOSITORY


def code_of(page: str, *, language: str = "python") -> str:
    """All blocks of a page of docs/ in a language, one after the other."""
    text = (REPOSITORY / "docs" / page).read_text()
    return "\n".join(re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL))


def recipe_folder(folder: Path, *pages: str) -> Path:
    """A folder whose recipe.py holds the Python of some pages."""
    folder.mkdir(exist_ok=True)
    (folder / "recipe.py").write_text("\n\n".join(code_of(page) for page in pages))
    return folder
