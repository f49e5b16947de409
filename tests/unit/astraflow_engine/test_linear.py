"""Products are those of torch's own in fp32, for any number of rows, packed or not."""

import pytest
import torch
import torch.nn.functional as F

from astraflow_engine.linear import Linear, padded_rows
from support.tiny_models import matrix_of


@pytest.mark.parametrize("is_packed", [True, False])
@pytest.mark.parametrize("biased", [True, False])
def test_a_product_is_torch_s_own_and_the_matrix_is_the_given_one_bit_by_bit(
    monkeypatch: pytest.MonkeyPatch, is_packed: bool, biased: bool
) -> None:
    if not is_packed:
        monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    weight, bias = torch.randn(640, 128), torch.randn(640) if biased else None
    linear = Linear(weight, bias)
    for shape in ((0, 128), (1, 128), (3, 128), (9, 128), (17, 128), (4, 37, 128)):
        values = torch.randn(shape)
        assert linear(values).shape == (*shape[:-1], 640)
        torch.testing.assert_close(linear(values), F.linear(values, weight, bias), atol=1e-4, rtol=1e-5)
    if not biased:
        assert torch.equal(matrix_of(linear, num_inputs=128), weight)
    assert linear.num_bytes == 4 * (640 * 128 + (640 if biased else 0))


def test_products_are_made_with_few_numbers_of_rows_and_little_padding() -> None:
    padded = [padded_rows(num_rows) for num_rows in range(2049)]
    assert padded[:17] == list(range(17))
    assert all(num_rows <= found < num_rows * 1.125 + 1 for num_rows, found in enumerate(padded))
    assert len(set(padded)) < 80
