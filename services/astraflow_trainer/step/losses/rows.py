"""Numbers of whole rows from those of their tokens.

Invariant: sums run in float64, and a row without tokens has 0. Called by the trust regions and the correction for the
sampler. Shape legend: N trained tokens, R rows.
"""

import torch


def row_sums(values_N: torch.Tensor, *, row_N: torch.Tensor, num_rows: int) -> torch.Tensor:
    """float64[R]: the sum over the tokens of each row."""
    zeros = torch.zeros(num_rows, dtype=torch.float64, device=values_N.device)
    return zeros.index_add(0, row_N, values_N.double())


def row_means(values_N: torch.Tensor, *, row_N: torch.Tensor, num_rows: int) -> torch.Tensor:
    """float64[R]: the mean over the tokens of each row."""
    counts = row_sums(torch.ones_like(row_N), row_N=row_N, num_rows=num_rows)
    return row_sums(values_N, row_N=row_N, num_rows=num_rows) / counts.clamp(min=1)


def row_maxima(values_N: torch.Tensor, *, row_N: torch.Tensor, num_rows: int) -> torch.Tensor:
    """float64[R]: the largest value of each row; values are at least 0."""
    zeros = torch.zeros(num_rows, dtype=torch.float64, device=values_N.device)
    return zeros.scatter_reduce(0, row_N, values_N.double(), "amax")
