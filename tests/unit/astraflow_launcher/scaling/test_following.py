"""An actuator hears every change once, a failed one again and ever later, and nothing while the server is away."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from astraflow.client import AsyncClient
from astraflow.dataflow.v1 import admin_service_pb2 as pb
from astraflow.errors import InvalidArgumentError, NotFoundError, UnavailableError
from astraflow_launcher.scaling.following import PoolFollower, Resized


@dataclass
class Reports:
    """A client whose server answers PoolReport with the next of these: a target, or an error."""

    answers: list[int | Exception]
    admin: Any = field(default_factory=lambda: type("Admin", (), {"PoolReport": None}))

    async def call(self, rpc: object, request: pb.PoolReportRequest, **_: object) -> pb.PoolReportResponse:
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        state = pb.Autoscaling(reason="because", pools={"eu": answer})
        return pb.PoolReportResponse(pools=[pb.PoolLoad(pool="eu", target_nodes=answer)], autoscaling=state)


@dataclass
class Scene:
    """A follower, the sizes that its pool was given, and what was told."""

    answers: list[int | Exception]
    failures: int = 0
    sizes: list[int] = field(default_factory=list)
    told: list[Resized] = field(default_factory=list)

    async def resize(self, nodes: int) -> None:
        """Fail as often as asked, then obey."""
        if self.failures:
            self.failures -= 1
            raise UnavailableError("no quota")
        self.sizes.append(nodes)

    def follower(self, *, pool: str = "eu") -> PoolFollower:
        """Of a client that answers by script."""
        client = cast("AsyncClient", Reports(self.answers))
        return PoolFollower(client, self, run_id="run", pool=pool, period_s=2, tell=self.told.append)


async def test_each_change_is_made_once() -> None:
    scene = Scene([1, 1, 3, 3, 2])
    follower = scene.follower()
    assert [await follower.round() for _ in range(5)] == [2] * 5
    assert scene.sizes == [1, 3, 2]
    assert scene.told[0] == Resized(nodes=1, reason="because")


async def test_a_failure_is_told_and_tried_again_ever_later() -> None:
    scene = Scene([3, 3, 3, 4], failures=2)
    follower = scene.follower()
    assert [await follower.round() for _ in range(4)] == [4, 8, 2, 2]
    assert scene.sizes == [3, 4]
    assert [told.problem for told in scene.told] == [
        "no quota; tried again in 4 s",
        "no quota; tried again in 8 s",
        "",
        "",
    ]


async def test_the_pool_keeps_its_size_while_the_server_is_away_and_ends_with_its_run() -> None:
    scene = Scene([2, UnavailableError("away"), NotFoundError("no such run")])
    scene_follower = scene.follower()
    await scene_follower.round()
    await scene_follower.round()
    await scene_follower.run(asyncio.Event())
    assert scene.sizes == [2]


async def test_a_run_that_there_never_was_is_refused() -> None:
    with pytest.raises(NotFoundError):
        await Scene([NotFoundError("no such run")]).follower().run(asyncio.Event())


async def test_a_pool_without_a_target_is_refused_with_those_there_are() -> None:
    with pytest.raises(InvalidArgumentError, match=r"no pool 'us', it names eu; give one of these"):
        await Scene([1]).follower(pool="us").round()
