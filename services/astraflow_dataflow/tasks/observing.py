"""Observing: curators get complete groups, many at a time, in parallel to the data path.

Groups wait in memory, so a killed server forgets those of its last moments; what was observed is saved before the
next ones are. One per run and process that has curators; fed by settling.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from astraflow.errors import NotFoundError, UnavailableError
from astraflow.plugins import Curator, Group
from astraflow_dataflow.rules.faults import PluginFaults
from astraflow_dataflow.runs.data_plugins import DataPlugin, with_states
from astraflow_dataflow.runs.registry import RunContext
from astraflow_dataflow.store.store import Store
from astraflow_kit.log import get_logger
from astraflow_kit.plugins import RAISED

log = get_logger(__name__)

_GROUPS_PER_CALL = 256
_AGAIN_S = 1.0


@dataclass(frozen=True)
class Observing:
    """Tells the curators of one run."""

    context: RunContext
    store: Store

    async def run(self) -> None:
        """Tell them until the run is gone or the task is cancelled."""
        await self.context.made.wait()
        waiting = self.context.plugins.unobserved
        while True:
            groups = [await waiting.get()]
            while len(groups) < _GROUPS_PER_CALL and not waiting.empty():
                groups.append(waiting.get_nowait())
            try:
                for curator in self.context.plugins.curators:
                    await self._tell(curator, groups)
            except NotFoundError:
                return

    async def _tell(self, curator: DataPlugin[Curator], groups: Sequence[Group]) -> None:
        """Have a curator observe groups, again while Redis is away. Raises NotFoundError when the run is gone."""
        plugins = self.context.plugins
        work = partial(plugins.in_thread, "curator", partial(observe, curator, groups, plugins.faults))
        while True:
            try:
                return await with_states(self.store.plugin_states, self.context.run_id, [curator], work)
            except UnavailableError as error:
                log.warning("curator.postponed", curator=curator.name, message=error.message)
                await asyncio.sleep(_AGAIN_S)


def observe(curator: DataPlugin[Curator], groups: Sequence[Group], faults: PluginFaults) -> None:
    """Tell a curator of groups; one that it fails on is left out."""
    with faults.timed("curator", curator.name):
        for group in groups:
            try:
                curator.made.observe(group)
            except UnavailableError:
                raise
            except RAISED as error:
                log.exception("curator.failed", curator=curator.name, group_id=group.group_id)
                faults.note("curator", curator.name, error)
