"""`python -m astraflow_trainer` and `astraflow trainer`."""

from collections.abc import Mapping

from astraflow_kit.daemon_command import daemon_command
from astraflow_trainer.settings import TrainerSettings, load_rank_settings

_ABOUT = """Start the trainer of one policy.

It gets the recipe and the store from the dataflow server, resumes from `--work-dir` when it holds a
checkpoint, and ends with status 0 when the last step is published. A second trainer of the same policy
with a `--work-dir` of its own takes over; the first one stops. With `torchrun --nproc-per-node N -m
astraflow_trainer …` N ranks train together; they need one `--work-dir` that all of them see.

`astraflow trainer --plan --recipe recipe.yaml --plan-ranks 8` says how much memory each of eight GPUs needs.

Example: `astraflow trainer --join 10.0.0.5:7070 --work-dir /data/run-1`
"""


# torch takes seconds to import: `--help` and wrong settings must not wait for it, so each imports the server itself.
def _run(settings: TrainerSettings) -> int:
    if settings.plan:
        from astraflow_trainer.planning import command

        return command.show(settings)
    rank = load_rank_settings()
    from astraflow_trainer import server

    return server.run(settings, rank)


def _check(settings: TrainerSettings) -> Mapping[str, str]:
    """Validate settings, connection, recipe, plug-ins and store, then exit."""
    from astraflow_trainer import server

    return server.check(settings)


app = daemon_command(TrainerSettings, name="trainer", about=_ABOUT, run=_run, check=_check)

if __name__ == "__main__":
    app()
