"""Eight bits keep what the update needs: the largest exactly, small ones to a few percent, no root at zero."""

import pytest
import torch

from astraflow_trainer.model.quantized import (
    BLOCK,
    ROOTS,
    SIGNED,
    CodeBook,
    blocks_of,
    dequantized,
    quantize_into,
)


def _quantized(values: torch.Tensor, book: CodeBook) -> tuple[torch.Tensor, torch.Tensor]:
    codes = torch.empty_like(values, dtype=torch.uint8)
    scales = torch.empty(*values.shape[:-1], blocks_of(values.shape[-1]))
    quantize_into(codes, scales, values, book)
    return codes, scales


def _through(values: torch.Tensor, book: CodeBook) -> torch.Tensor:
    return dequantized(*_quantized(values, book), book)


@pytest.mark.parametrize("book", [SIGNED, ROOTS], ids=["signed", "roots"])
@pytest.mark.parametrize("columns", [1, BLOCK, BLOCK + 3])
def test_errors_are_bounded_and_what_was_read_is_written_the_same(book: CodeBook, columns: int) -> None:
    values = torch.randn(2, 5, columns, generator=torch.Generator().manual_seed(0)) * 1e-6
    values = values.abs() if book is ROOTS else values
    codes, scales = _quantized(values, book)
    read = dequantized(codes, scales, book)
    largest = torch.stack([block.abs().amax(-1) for block in values.split(BLOCK, dim=-1)], -1)
    # Of the largest in its block: half of 0.9/64 where a sign takes a bit, of 0.9/128 where none does.
    bound = largest.repeat_interleave(BLOCK, -1)[..., :columns] * (
        0.9 / (64 if book is SIGNED else 128) / 2 + 1e-6
    )
    assert ((read - values).abs() <= bound * 1.5).all()
    again = _quantized(read, book)
    assert torch.equal(again[0], codes)
    assert torch.equal(again[1], scales)


def test_the_largest_of_a_block_is_exact_and_blocks_end_with_their_row() -> None:
    values = torch.full((2, BLOCK + 1), 1e-7)
    values[0, 3], values[1, BLOCK] = 0.3, 0.7
    codes, scales = _quantized(values, ROOTS)
    assert scales.tolist() == [pytest.approx(row) for row in ([0.3, 1e-7], [1e-7, 0.7])]
    read = dequantized(codes, scales, ROOTS)
    assert (read[0, 3], read[1, BLOCK]) == (values[0, 3], values[1, BLOCK])


def test_small_numbers_keep_their_magnitude_over_six_powers_of_ten() -> None:
    exponents = torch.arange(0, 6.01, 0.25)
    values = (10.0**-exponents)[None]
    assert (_through(values, ROOTS) / values - 1).abs().max() < 0.6
    assert (_through(values[:, :13], ROOTS) / values[:, :13] - 1).abs().max() < 0.05


def test_a_root_is_never_rounded_to_zero_and_zero_stays_zero() -> None:
    values = torch.tensor([[1.0, 1e-30, 0.0]])
    read = _through(values, ROOTS)[0]
    assert read[1] > 0
    assert read[2] == 0
    assert torch.equal(_through(torch.zeros(2, 3), SIGNED), torch.zeros(2, 3))
