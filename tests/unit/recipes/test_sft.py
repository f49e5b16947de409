"""What training tasks show is learned as it stands and earns 1; what is held out is sampled."""

from pathlib import Path

import pytest

from support.recipes import played, task_data


@pytest.mark.parametrize("file", ["sft", "sft/small.yaml"])
async def test_a_demonstration_is_pushed_as_it_stands_and_is_right(file: str, tmp_path: Path) -> None:
    given = [f"run.dataset.with.folder={task_data('gsm8k')}"] if file == "sft" else []
    async with played(file, *given, scratch=tmp_path) as sft:
        for index in range(3):
            task = sft.dataset.train(index)
            assert task is not None
            episode = await sft.episode(task, solver=lambda _: "never asked")
            (trajectory,) = episode.trajectories
            assert (trajectory.policy, trajectory.reward) == ("solver", 1.0)
            shown = [
                chr(token)
                for token, trained in zip(trajectory.token_ids, trajectory.loss_mask, strict=True)
                if trained
            ]
            assert "".join(shown).startswith(task.data["completion"])
            assert "<<" not in task.data["completion"]
