"""The codec functions that the weight package promises by name."""

import astraflow_weights
from support.source_tree import REPOSITORY
from support.weight_models import make_model, same_model, trained

NAMES = [
    "Schema",
    *("apply_delta", "decode_snapshot", "encode_delta", "encode_snapshot"),
    *("invert_delta", "merge_deltas", "summarize_delta"),
]


def test_the_package_exports_what_its_page_documents() -> None:
    page = (REPOSITORY / "docs" / "weights.md").read_text()
    assert astraflow_weights.__all__ == NAMES
    assert [name for name in NAMES if f"`{name}`" not in page] == []


def test_what_is_exported_leads_there_and_back() -> None:
    schema = astraflow_weights.Schema.of_model(make_model())
    before = astraflow_weights.decode_snapshot(astraflow_weights.encode_snapshot(make_model()), schema=schema)
    after = trained(before, 1)
    there = astraflow_weights.encode_delta(before, after, base_version=0, target_version=1)
    back = astraflow_weights.invert_delta(there, schema=schema, target_version=2)
    astraflow_weights.apply_delta(before, there)
    assert same_model(before, after)
    circle = astraflow_weights.merge_deltas([there, back], schema=schema)
    assert astraflow_weights.summarize_delta(circle).num_changed == 0
