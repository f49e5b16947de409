"""Work done by several threads whose results are taken in order.

Invariant: results come in the order of their items whatever thread was faster, so what is made of them has equal bytes
for any number of threads; at most twice as many items as threads are under way, which bounds the memory. Encoders
and uploads call it.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def in_order(
    work: Callable[[Item], Result], items: Iterable[Item], *, threads: int, name: str
) -> Iterator[Result]:
    """What `work` returns for each item. Raises the first failure, in order of the items, when its turn comes.

    With one thread the caller's does the work. Items are taken by the caller's thread, as room becomes free.
    """
    if threads == 1:
        yield from map(work, items)
        return
    with ThreadPoolExecutor(threads, thread_name_prefix=name) as pool:
        under_way: deque[Future[Result]] = deque()
        try:
            for item in items:
                under_way.append(pool.submit(work, item))
                if len(under_way) == 2 * threads:
                    yield under_way.popleft().result()
            while under_way:
                yield under_way.popleft().result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
