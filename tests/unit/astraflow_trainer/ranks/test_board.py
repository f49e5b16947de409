"""The newest message of the first rank, for whoever looks."""

from torch._C._distributed_c10d import HashStore

from astraflow_trainer.ranks.board import Board


def test_a_message_is_seen_by_its_number_until_the_next_one() -> None:
    store = HashStore()
    shows, sees = Board(store), Board(store)
    assert sees.seen(1) is None
    shows.show(1, b"\x00first")
    assert (sees.seen(1), sees.seen(2)) == (b"\x00first", None)
    shows.show(2, b"second")
    assert (sees.seen(1), sees.seen(2)) == (None, b"second")
