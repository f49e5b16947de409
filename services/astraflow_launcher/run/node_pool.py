"""The nodes of one pool as child processes: started, and let go by the drain that every node has.

Invariant: a node that is let go is never killed for it. It takes no new leases, finishes those it holds or gives them
back in its own time, and its name and folder, with the weights in it, are free once its process has ended. A
`PoolActuator`; made by `development_run`.
"""

from collections.abc import Awaitable, Callable
from itertools import count

from astraflow.recipe import Recipe
from astraflow_launcher.run.processes import Child


class NodePool:
    """Resizes by `start`, which starts the node of a name, and by retiring the newest children."""

    def __init__(self, pool: str, start: Callable[[str], Awaitable[Child]]) -> None:
        self._pool, self._start = pool, start
        self._at_work: list[Child] = []
        self._leaving: list[Child] = []

    async def resize(self, nodes: int) -> None:
        """Have so many nodes; asking twice changes nothing."""
        self._leaving = [child for child in self._leaving if not child.finished.is_set()]
        while len(self._at_work) > nodes:
            child = self._at_work.pop()
            child.retire()
            self._leaving.append(child)
        while len(self._at_work) < nodes:
            taken = {child.spec.name for child in (*self._at_work, *self._leaving)}
            names = (node_name(self._pool, number) for number in count(1))
            self._at_work.append(await self._start(next(name for name in names if name not in taken)))


def node_name(pool: str, number: int) -> str:
    """Of the number-th node of a pool; of the only pool, which is called nothing, without it."""
    return f"node-{pool}-{number}" if pool else f"node-{number}"


def first_nodes(recipe: Recipe, *, num_nodes: int) -> dict[str, int]:
    """How many nodes each pool begins with: `num_nodes` where the number of nodes is not the run's own affair."""
    scaling = recipe.raas.autoscaling
    return scaling.split(scaling.first_nodes) if scaling and recipe.trains else {"": num_nodes}
