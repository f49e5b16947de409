"""A step in traces: linked to the tasks of its batch, and told in the trace of each of them.

Invariant: a step has a trace of its own, because a batch joins many tasks; both sides name the other. Only the first
rank records. Called by the training loop.
"""

from astraflow.dataflow.v1 import batch_pb2
from astraflow_kit import traces


def link_tasks(recorded: traces.Span, batch: batch_pb2.Batch, *, run: str) -> None:
    """Say of a step's span which recorded tasks it trains on; `run` is the identity of the run."""
    if not recorded.is_recording():
        return
    recorded.set_attributes({"astraflow.batch": batch.batch_id, "astraflow.trajectories": len(batch.items)})
    for root in _roots(batch, run=run):
        recorded.add_link(root)


def record_trained(batch: batch_pb2.Batch, *, run: str, version: int | None, began_s: float) -> None:
    """Record in the trace of each task that the step trained on it, and the version that it publishes; None: it was
    skipped. `began_s` is when computing began, by `time.time`.
    """
    step = traces.here()
    if step is None:
        return
    named: dict[str, traces.Value] = {"astraflow.policy": batch.policy_id, "astraflow.step": batch.step}
    named |= {"astraflow.batch": batch.batch_id, "astraflow.skipped": version is None}
    named |= {} if version is None else {"astraflow.version": version}
    for root in _roots(batch, run=run):
        traces.record(
            f"train {batch.policy_id}", began_s=began_s, under=root, attributes=named, links=(step,)
        )


def _roots(batch: batch_pb2.Batch, *, run: str) -> list[traces.Place]:
    places = (traces.task(run, task_id) for task_id in dict.fromkeys(item.task_id for item in batch.items))
    return [place for place in places if place is not None and place.trace_flags.sampled]
