"""A server, a store and checkpoints tell of one past, or a person must decide."""

from dataclasses import dataclass

import pytest

from astraflow_weights.versions.standing import LOSS_WINDOW_S, Known, ServerStanding, compare

OURS, OTHER = "a" * 32, "b" * 32


@dataclass(frozen=True)
class Version:
    """A version of the log: its step has its number."""

    version: int
    created_time_s: float

    @property
    def step(self) -> int:
        return self.version


def server(
    step: int, *, version: int | None = None, durable: int = 0, identity: str = OURS
) -> ServerStanding:
    """A server that knows the step, and its version unless another is named; -1 is none."""
    announced = step if version is None else version
    return ServerStanding(
        identity=identity,
        finished_step=step,
        version=None if announced < 0 else announced,
        durable_step=durable,
    )


def known(*created_s: float, checkpoints: tuple[int, ...] = (), identity: str = OURS) -> Known:
    """A log with versions written at these times, and checkpoints."""
    return Known(
        store_identity=identity,
        versions=[Version(number, at) for number, at in enumerate(created_s)],
        checkpoint_identity=identity if checkpoints else "",
        checkpoint_steps=checkpoints,
        checkpoint_version=checkpoints[-1] if checkpoints else None,
    )


NOTHING = Known()
EVERY_MINUTE = tuple(60.0 * number for number in range(7))
SHORTLY = tuple(0.5 * number for number in range(7))
RUN = known(*EVERY_MINUTE, checkpoints=(4, 6))

AGREE = {
    "a new run": (server(0, version=-1), NOTHING),
    "all know the same": (server(6, durable=6), RUN),
    "the server knows more steps than there are checkpoints": (server(6, durable=4), known(*EVERY_MINUTE)),
    "announcements were lost": (server(6, version=4, durable=6), RUN),
    "the last step was lost": (server(5), known(*EVERY_MINUTE, checkpoints=(2, 4))),
    "what was answered within the window was lost": (server(1), known(*SHORTLY)),
    "a loss that was judged before: every version is announced": (server(4, version=6), RUN),
    "the checkpoint before the newest can be gone on from": (server(5, version=6, durable=4), RUN),
    "before the first checkpoint was known": (server(1, version=6), known(*SHORTLY, checkpoints=(2,))),
    "a run that an older release made": (server(6, durable=6, identity=""), RUN),
    "a store that an older release wrote": (server(6, durable=6), known(*EVERY_MINUTE, identity="")),
}


@pytest.mark.parametrize("case", AGREE)
def test_the_lower_side_catches_up_within_what_redis_may_lose(case: str) -> None:
    assert compare(*AGREE[case]) is None


OLDER = "Redis is older than the"
DOUBT = {
    "Redis was emptied": (server(0, version=-1, identity=OTHER), RUN, "identity b{32}, not a{32}", 6),
    "the same before the first checkpoint": (
        server(0, version=-1, identity=OTHER),
        known(*EVERY_MINUTE),
        "start with the --work-dir",
        None,
    ),
    "only the initial model was published": (
        server(0, version=-1, identity=OTHER),
        known(0.0),
        "identity",
        0,
    ),
    "a backup of minutes ago": (server(2), RUN, f"{OLDER} store: it lost 120 s or more", 6),
    "three versions are enough to tell": (server(3), RUN, f"{OLDER} store: it lost 60 s or more", 6),
    "without checkpoints": (server(2), known(*EVERY_MINUTE), "start with the --work-dir", None),
    "shortly, but between two checkpoints": (server(3), known(*SHORTLY, checkpoints=(4, 6)), OLDER, 6),
    "no checkpoint to go back to": (server(5, durable=3), known(*SHORTLY, checkpoints=(6,)), OLDER, 6),
    "the store lost versions": (
        server(6),
        known(*EVERY_MINUTE[:3]),
        "the store has versions up to 2, but",
        None,
    ),
    "another store": (
        server(6, version=-1),
        Known(checkpoint_steps=(6,), checkpoint_version=6),
        "Mount or",
        None,
    ),
    "a work folder of another run": (
        server(6),
        Known(store_identity=OURS, checkpoint_identity=OTHER, checkpoint_steps=(6,)),
        "the checkpoints are of the run of identity b",
        None,
    ),
}


@pytest.mark.parametrize("case", DOUBT)
def test_more_than_redis_may_lose_is_for_a_person_to_decide(case: str) -> None:
    standing, remembered, message, step = DOUBT[case]
    doubt = compare(standing, remembered)
    assert doubt is not None
    assert doubt.step == step
    assert message.replace("b{32}", OTHER).replace("a{32}", OURS) in doubt.message
    assert "Nothing was changed or deleted" in doubt.message


def test_the_message_has_both_values_and_both_remedies() -> None:
    doubt = compare(server(2, durable=2), RUN)
    assert doubt is not None
    for said in ("steps up to 2 and versions up to 2", "versions up to 6 of step 6", "of step 6"):
        assert said in doubt.message
    for remedy in ("Restore the Redis that has step 6", "--accept-data-loss: training goes on after step 6"):
        assert remedy in doubt.message


def test_slow_uploads_and_one_lost_moment_are_no_contradiction() -> None:
    """Two steps were answered in the second that was lost; their versions took a minute each to upload."""
    assert compare(server(4), known(*EVERY_MINUTE)) is None


def test_a_loss_of_just_the_window_is_borne() -> None:
    at_most, more = (known(0, 1, 1 + lost_s, 60) for lost_s in (LOSS_WINDOW_S, LOSS_WINDOW_S + 1))
    assert compare(server(0), at_most) is None
    assert compare(server(0), more) is not None
