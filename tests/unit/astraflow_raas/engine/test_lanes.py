"""Many requests at once never share a pool of more than a few connections, and none waits for another's."""

import httpx

from astraflow_raas.engine.lanes import LANE_CONNECTIONS, Lanes


async def test_requests_beyond_a_full_lane_get_the_next_one_and_free_places_are_used_again() -> None:
    lanes = Lanes("http://127.0.0.1:9", timeout=httpx.Timeout(1.0))
    held = [lanes.lane() for _ in range(2 * LANE_CONNECTIONS + 1)]
    clients = [await lane.__aenter__() for lane in held]
    assert [clients.count(client) for client in dict.fromkeys(clients)] == [
        LANE_CONNECTIONS,
        LANE_CONNECTIONS,
        1,
    ]
    await held[0].__aexit__(None, None, None)
    async with lanes.lane() as again:
        assert again is clients[0]
    for lane in held[1:]:
        await lane.__aexit__(None, None, None)
    await lanes.close()
