"""What several requests mean by a field that is not set. Pure; called by the servicers."""

from typing import Protocol

_PAGE = 50


class PageRequest(Protocol):
    """A request for one page of a list."""

    page_size: int


def page_size(request: PageRequest) -> int:
    """Return how many items a page has."""
    return request.page_size or _PAGE
