"""The recipes that come with this release, by name.

Invariant: a name stands for the same files in a wheel and in a checkout. Asked by `load_recipe`, and by daemons, which
may run the code of these recipes without leave.
"""

from collections.abc import Iterator
from pathlib import Path

_PACKAGE = Path(__file__).parents[1]


def shipped_recipes() -> dict[str, Path]:
    """Folder of each recipe by its name, in order of the names; empty where none was installed."""
    return {folder.name: folder for folder in sorted(_folders())}


def find_shipped(name: str) -> Path | None:
    """Return the folder of the recipe of this name; None when it is none of them."""
    return shipped_recipes().get(name)


def _folders() -> Iterator[Path]:
    # A wheel carries them in the package; a checkout has them at its top, beside what says that it is one.
    checkout = _PACKAGE.parents[2]
    places = [_PACKAGE / "shipped_recipes"]
    if (checkout / "pyproject.toml").is_file() and (checkout / "clients" / "python" / "astraflow").samefile(
        _PACKAGE
    ):
        places.append(checkout / "recipes")
    for place in places:
        yield from (path.parent for path in place.glob("*/recipe.yaml"))
