"""Leases as messages."""

from astraflow_dataflow.tasks.leasing import task_seed


def test_a_task_samples_the_same_under_every_attempt_and_differently_from_others() -> None:
    assert task_seed(1, "t1") == task_seed(1, "t1")
    assert len({task_seed(seed, task) for seed in range(3) for task in ("t1", "t2")}) == 6
    assert all(0 <= task_seed(0, f"t{n}") < 2**63 for n in range(100))
