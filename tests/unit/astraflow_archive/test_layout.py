"""Keys and sample ids lead back to their file; what was never given is refused."""

import pytest

from astraflow.errors import InvalidArgumentError
from astraflow_archive.layout import Place, located, prefix
from astraflow_weights.store.layout import check_key

PLACE = Place(
    run_id="r", policy_id="solver.v-1", step=12, name="1763890000000-0_1763890000001-7_00ff00ff00ff00ff"
)


def test_a_key_is_one_that_stores_take_and_leads_back() -> None:
    assert check_key(PLACE.key) == PLACE.key
    assert Place.at(PLACE.key) == PLACE
    assert PLACE.ms == 1763890000000
    assert PLACE.key.startswith(prefix("r", policy_id="solver.v-1", step=12))


def test_other_keys_of_a_run_are_no_files_of_its_archive() -> None:
    assert Place.at("r/solver/seq/00000000000000000001.pb") is None
    assert Place.at(f"{PLACE.key}.tmp") is None


def test_keys_sort_by_policy_step_and_time() -> None:
    def key(step: int, ms: int) -> str:
        return Place(run_id="r", policy_id="p", step=step, name=f"{ms}-0_{ms}-0_aa").key

    order = [(9, 1763890000001), (10, 1763890000000), (10, 1763890000002), (100, 1763890000000)]
    assert sorted(key(*each) for each in order) == [key(*each) for each in order]


def test_a_sample_id_leads_to_file_and_row() -> None:
    assert located("r", PLACE.sample_id(3)) == (PLACE, 3)


@pytest.mark.parametrize(
    "wrong", ["", "x", "../../etc/1/1763890000000/1", "p/1/1763890000000", "p/x/1763890000000/1"]
)
def test_what_is_no_sample_id_is_refused(wrong: str) -> None:
    with pytest.raises(InvalidArgumentError, match="ListSamples"):
        located("r", wrong)
