"""The model of the WAN experiment: as large as asked for, trained, and not one block over and over."""

import numpy as np

from astraflow_bench.wan.trainer_role import SimulatedPolicy


def made(*, copies: int) -> SimulatedPolicy:
    return SimulatedPolicy(block_elements=2**18, copies=copies, learning_rate=1e-6, seed=0)


def test_the_model_has_as_many_weights_as_its_copies() -> None:
    assert sum(bits.size for bits in made(copies=3).bits().values()) == 3 * 2**18


def test_copies_hold_the_same_weights_at_other_places() -> None:
    bits = list(made(copies=3).bits().values())
    for other in bits[1:]:
        assert np.array_equal(np.sort(other, axis=None), np.sort(bits[0], axis=None))
        assert np.mean(other == bits[0]) < 0.1


def test_a_step_changes_a_small_share_of_every_copy() -> None:
    policy = made(copies=2)
    before = {name: bits.copy() for name, bits in policy.bits().items()}
    policy.step()
    for name, bits in policy.bits().items():
        assert 0.005 < np.mean(bits != before[name]) < 0.02
