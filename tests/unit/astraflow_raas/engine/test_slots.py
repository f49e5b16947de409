"""Places are handed out in the order of asking, never more than there are, from the rank with the most."""

import asyncio

from astraflow_raas.engine.slots import EngineSlots


async def test_nobody_gets_more_than_is_free_and_ranks_are_filled_evenly() -> None:
    slots = EngineSlots(4, num_ranks=2)
    assert await slots.take(lambda: 3) == (0, 3)
    assert await slots.take(lambda: 9) == (1, 4)
    assert await slots.take(lambda: 9) == (0, 1)
    slots.give_back(1, 2)
    assert await slots.take(lambda: 0) == (1, 0), "who wants none any more takes none"
    assert await slots.take(lambda: 1) == (1, 1)


async def test_who_asks_first_is_served_first_and_who_leaves_blocks_nobody() -> None:
    slots = EngineSlots(1)
    await slots.take(lambda: 1)
    served: list[str] = []

    async def ask(name: str) -> None:
        await slots.take(lambda: 1)
        served.append(name)

    leaver, *others = [asyncio.create_task(ask(name)) for name in ("leaver", "second", "third")]
    await asyncio.sleep(0)
    leaver.cancel()
    for _ in others:
        slots.give_back(0, 1)
        await asyncio.sleep(0.01)
    await asyncio.gather(*others)
    assert served == ["second", "third"]
