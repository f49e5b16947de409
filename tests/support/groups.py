"""Groups as a plug-in sees them, in one line."""

from astraflow.plugins import Group, TaskSpec, TrajectorySummary


def group(*rewards: float, verdict: str = "", **facts: object) -> Group:
    """A group whose trajectories earned `rewards`; `facts` are the same for each of them."""
    trajectories = tuple(TrajectorySummary(reward=reward, **facts) for reward in rewards)  # type: ignore[arg-type]
    return Group(task=TaskSpec("t", ()), trajectories=trajectories, verdict=verdict)
