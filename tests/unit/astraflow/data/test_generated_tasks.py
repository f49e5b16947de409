"""Tasks that are drawn: the same for the same seed, split and index, and never the same id twice."""

from random import Random

from astraflow.data.generated_tasks import GeneratedTasks
from astraflow.plugins import TaskSpec


class Numbers(GeneratedTasks):
    def task(self, task_id: str, rng: Random, *, held_out: bool) -> TaskSpec:
        return TaskSpec(task_id, (), {"number": 2 * rng.randrange(10**9) + held_out})


def test_a_task_follows_from_seed_split_and_index_alone() -> None:
    tasks = Numbers(seed=1)
    drawn = [[split(index) for index in range(20)] for split in (tasks.train, tasks.heldout)]
    assert [task.data["number"] % 2 for split in drawn for task in split] == [0] * 20 + [1] * 20
    assert Numbers(seed=1).heldout(7) == drawn[1][7]
    assert Numbers(seed=2).train(7) != drawn[0][7]
    assert len({(task.task_id, task.data["number"] // 2) for split in drawn for task in split}) == 40
    assert (drawn[0][3].task_id, drawn[1][3].task_id) == ("train-3", "heldout-3")
