"""A reward that varies within a group whatever the model says, so that every step can be trained on."""

from zlib import crc32

from astraflow.plugins import TaskSpec


class Noisy:
    """A stable pseudo-random number in [0, 1) of the completion."""

    def __call__(self, task: TaskSpec, completion: str) -> float:
        del task
        return crc32(completion.encode()) / 2**32
