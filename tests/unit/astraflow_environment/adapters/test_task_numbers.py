"""Numbers of tasks, split once and for ever."""

import pytest

from astraflow_environment.adapters.task_numbers import TaskNumbers


def test_epochs_have_every_training_number_once_and_no_held_out_one() -> None:
    numbers = TaskNumbers(seed=1, num_train=50, num_heldout=10)
    epochs = [[numbers.train(50 * epoch + place).data["idx"] for place in range(50)] for epoch in range(2)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(10, 60))] * 2
    assert epochs[0] != epochs[1]
    heldout = [numbers.heldout(index) for index in range(11)]
    assert [task.data["idx"] for task in heldout if task is not None] == list(range(10))
    assert numbers.train(7) == TaskNumbers(seed=1, num_train=50, num_heldout=10).train(7)


@pytest.mark.parametrize("sizes", [{"num_train": 0}, {"num_train": 1, "num_heldout": -1}])
def test_a_data_set_without_training_tasks_is_refused(sizes: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="at least"):
        TaskNumbers(seed=1, **sizes)
