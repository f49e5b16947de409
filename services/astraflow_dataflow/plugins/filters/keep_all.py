"""The filter that keeps every group; the same as naming none, for recipes that want to say so. Pure."""

from astraflow.plugins import Group


class KeepAll:
    """Keeps every group."""

    def __call__(self, group: Group) -> bool:
        """Return True."""
        return True
