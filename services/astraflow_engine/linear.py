"""Products with the matrices of a model, in fp32.

oneDNN picks its code by what a processor can do, MKL, which torch uses for plain products, also by who made it: on an
AMD EPYC oneDNN takes half the time. It wants matrices in a layout of its own, made once for each version, and keeps
code for each number of rows that it has seen, 0.8 MB each: rows are padded to one of few numbers, so that an engine
does not grow for as long as it sees new lengths.

Shape legend: O outputs, I inputs.
"""

import torch
import torch.nn.functional as F


class Linear:
    """x @ weight.T + bias."""

    __slots__ = ("_bias_O", "_packed", "_weight_OI")

    def __init__(self, weight_OI: torch.Tensor, bias_O: torch.Tensor | None = None) -> None:
        self._packed = torch.backends.mkldnn.is_available()
        self._weight_OI: torch.Tensor = (
            torch.ops.mkldnn._reorder_linear_weight(weight_OI, None) if self._packed else weight_OI
        )
        self._bias_O = bias_O

    @property
    def num_bytes(self) -> int:
        """Resident bytes."""
        return 4 * (self._weight_OI.numel() + (0 if self._bias_O is None else self._bias_O.numel()))

    def __call__(self, values: torch.Tensor) -> torch.Tensor:
        """[..., I] to [..., O], fresh memory."""
        if not self._packed:
            return F.linear(values, self._weight_OI, self._bias_O)
        num_rows = values.shape[:-1].numel()
        num_padding = padded_rows(num_rows) - num_rows
        if not num_padding:
            return self._product(values)
        rows = F.pad(values.reshape(num_rows, -1), (0, 0, 0, num_padding))
        product: torch.Tensor = self._product(rows)[:num_rows].unflatten(0, values.shape[:-1])
        return product

    def _product(self, values: torch.Tensor) -> torch.Tensor:
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            values, self._weight_OI, self._bias_O, "none", [], ""
        )
        return product


def padded_rows(num_rows: int) -> int:
    """The least of the numbers of rows that products are made with that is enough: eight of them for every power of 2,
    so that at most a ninth of a product is of padding. With four, decoding took 6 % longer than without.
    """
    step: int = 1 << max(0, num_rows.bit_length() - 4)
    return -(-num_rows // step) * step
