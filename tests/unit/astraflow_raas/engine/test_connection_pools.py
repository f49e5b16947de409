"""Many requests at once never share a pool of more than a few connections, and none waits for another's."""

from collections import Counter

import httpx

from astraflow_raas.engine.connection_pools import POOL_CONNECTIONS, ConnectionPools


async def test_requests_beyond_a_full_pool_get_the_next_one_and_free_places_are_used_again() -> None:
    pools = ConnectionPools("http://127.0.0.1:9", timeout=httpx.Timeout(1.0))
    held = [pools.client() for _ in range(2 * POOL_CONNECTIONS + 1)]
    clients = [await opened.__aenter__() for opened in held]
    assert list(Counter(clients).values()) == [POOL_CONNECTIONS, POOL_CONNECTIONS, 1]
    await held[0].__aexit__(None, None, None)
    async with pools.client() as again:
        assert again is clients[0]
    for opened in held[1:]:
        await opened.__aexit__(None, None, None)
    await pools.close()
