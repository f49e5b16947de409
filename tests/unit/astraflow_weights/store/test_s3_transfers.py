"""A transfer is judged by what it moves in each window, not by its age."""

import pytest

from astraflow_weights.settings import StoreSettings
from astraflow_weights.store import s3_requests, s3_transfers

SETTINGS = StoreSettings(progress_bytes=100, progress_window_s=10)


def test_a_transfer_that_moves_enough_goes_on_for_ever() -> None:
    now = 0.0
    progress = s3_transfers.Progress(SETTINGS, clock=lambda: now)
    for _ in range(1000):
        now += 5
        progress.moved(50)


def test_a_transfer_that_moves_too_little_in_a_window_is_cut() -> None:
    now = 0.0
    progress = s3_transfers.Progress(SETTINGS, clock=lambda: now)
    progress.moved(10_000)
    now = 10.0
    progress.moved(99)
    now = 20.0
    with pytest.raises(s3_requests.Passing, match=r"99 bytes moved in 10\.0 s, less than 100 in 10 s"):
        progress.moved(99)


def test_a_window_that_is_restarted_forgets_the_wait_before_it() -> None:
    now = 0.0
    progress = s3_transfers.Progress(SETTINGS, clock=lambda: now)
    now = 100.0
    progress.restart()
    progress.moved(1)


def test_a_burst_after_a_long_wait_is_judged_by_its_rate() -> None:
    now = 0.0
    progress = s3_transfers.Progress(SETTINGS, clock=lambda: now)
    now = 100.0
    with pytest.raises(s3_requests.Passing, match=r"999 bytes moved in 100\.0 s, less than 100 in 10 s"):
        progress.moved(999)
