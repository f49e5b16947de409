"""Everything a Redis database holds, key by key, to be compared: what a refused call must leave as it was.

Contents rather than DUMP, whose bytes depend on the order in which a hash table happens to lie in memory.
"""

from collections.abc import Callable, Mapping
from typing import Any

import redis

from astraflow_dataflow.store.keys import own_key

Content = dict[str, object]

_READ: Mapping[bytes, Callable[[Any, bytes], object]] = {
    b"string": lambda client, key: client.get(key),
    b"hash": lambda client, key: client.hgetall(key),
    b"set": lambda client, key: client.smembers(key),
    b"list": lambda client, key: client.lrange(key, 0, -1),
    b"zset": lambda client, key: client.zrange(key, 0, -1, withscores=True),
    b"stream": lambda client, key: (client.xrange(key), [_group(row) for row in client.xinfo_groups(key)]),
}


def redis_content(url: str) -> Content:
    """Every key with what it holds, but for the server's own pulse, which goes on whatever is called."""
    with redis.Redis.from_url(url) as client:
        keys = [key for key in client.keys("*") if key.decode() != own_key("beat")]
        return {key.decode(): _READ[client.type(key)](client, key) for key in keys}


def _group(row: Mapping[str, object]) -> tuple[object, object, object]:
    return row["name"], row["pending"], row["last-delivered-id"]
