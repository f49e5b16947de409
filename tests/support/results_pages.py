"""Pages of docs/results/ that several soaks write, one section each."""

from pathlib import Path


def replace_section(page: Path, title: str, body: str) -> None:
    """Write `## TITLE` with this body, in place of the one that the page has, else at its end."""
    heading = f"## {title}\n"
    before, found, after = page.read_text().partition(heading)
    following = after.partition("\n## ")[2] if found else ""
    rest = f"\n## {following}" if following else ""
    page.write_text(f"{before.rstrip()}\n\n{heading}\n{body.strip()}\n{rest}")
