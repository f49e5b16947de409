"""Rows of a lane are kept apart by borders as they are by a mask, and the kernels are given what they want."""

import inspect
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.nn.attention import varlen

from astraflow_trainer.batches.packing import MicroBatch, filler, pack
from astraflow_trainer.model import attention, sharding
from astraflow_trainer.model.attention import Reading, pieces
from astraflow_trainer.model.model import PolicyModel
from astraflow_trainer.model.sharding import Placement
from support.attention_kernel import piece_by_piece
from support.tiny_training import MakePolicy, make_rows

CUDA = torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("documents", "borders", "longest"),
    [
        ([[0, 0, 0]], [0, 3], 3),
        ([[0, 0, 1, 2, 2, 2]], [0, 2, 3, 6], 3),
        ([[0, 0, 1, -1], [0, 0, 0, 0]], [0, 2, 3, 4, 8], 4),
        ([[0, -1, -1], [0, -1, -1]], [0, 1, 3, 4, 6], 2),
    ],
    ids=["one row", "three rows", "two lanes of one number at their border", "padding is a piece of its own"],
)
def test_a_piece_is_a_row_or_a_lane_s_padding(
    documents: list[list[int]], borders: list[int], longest: int
) -> None:
    found = pieces(torch.tensor(documents))
    assert found.borders_P1.tolist() == borders
    assert found.borders_P1.dtype == torch.int32
    assert found.longest == longest


def _batches(kind: str) -> Sequence[MicroBatch]:
    if kind == "filler":
        return [filler()]
    return pack(make_rows(), token_budget=64, lane_tokens=None if kind == "bounded" else 32)


@pytest.mark.parametrize("kind", ["bounded", "wide", "filler"])
@pytest.mark.parametrize("recompute", [False, True])
def test_scores_and_gradient_are_those_under_a_mask(
    make_policy: MakePolicy, kind: str, recompute: bool
) -> None:
    masked = make_policy()
    by_pieces = make_policy(placement=Placement(recompute="full" if recompute else "none")).train()
    by_pieces.attend_by("reference", piece_by_piece)
    batches = _batches(kind)
    assert kind == "filler" or any(not batch.one_row_per_lane for batch in batches)
    for batch in batches:
        one, other = masked.score(batch), by_pieces.score(batch)
        torch.testing.assert_close(other.logprob_N, one.logprob_N, atol=1e-6, rtol=1e-5)
        one.logprob_N.sum().backward()
        other.logprob_N.sum().backward()
    for mine, theirs in zip(masked.parameters(), by_pieces.parameters(), strict=True):
        if mine.grad is not None:
            assert theirs.grad is not None
            torch.testing.assert_close(theirs.grad, mine.grad, atol=1e-5, rtol=1e-4)


def test_the_kernel_is_given_the_borders_of_the_very_batch(make_policy: MakePolicy) -> None:
    policy, (batch, *_) = make_policy(sharded=False), _batches("wide")
    given: list[Reading] = []

    def kernel(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, reading: Reading) -> torch.Tensor:
        given.append(reading)
        assert [column.shape[1:] for column in (query, key, value)] == [(2, 8), (1, 8), (1, 8)]
        return piece_by_piece(query, key, value, reading)

    policy.attend_by("watched", kernel)
    policy.score(batch)
    assert len(given) == 2
    expected = pieces(batch.document_ids_BL)
    for reading in given:
        assert torch.equal(reading.borders_P1, expected.borders_P1)
        assert (reading.longest, reading.window) == (expected.longest, None)
        assert reading.scale == pytest.approx(8**-0.5)


def test_without_borders_a_model_attends_as_before(make_policy: MakePolicy) -> None:
    plain, by_pieces = make_policy(sharded=False), make_policy(sharded=False)
    by_pieces.attend_by("reference", piece_by_piece)
    ids = torch.arange(12).view(2, 6)
    with torch.no_grad():
        expected = plain.next_token_logprobs(ids, last=2)
        assert torch.equal(by_pieces.next_token_logprobs(ids, last=2), expected)


def test_long_lanes_cost_nothing_where_attention_keeps_to_rows(make_policy: MakePolicy) -> None:
    policy = make_policy(sharded=False)
    bounded = policy.attention_tokens
    policy.attend_by("reference", piece_by_piece)
    rows = make_rows()
    widths = [
        max(batch.token_ids_BL.shape[1] for batch in pack(rows, token_budget=512, attention_tokens=tokens))
        for tokens in (1.0, bounded, policy.attention_tokens)
    ]
    assert policy.attention_tokens == float("inf")
    assert widths[0] <= widths[1] <= widths[2]


@pytest.mark.parametrize(
    ("device", "dtype", "capability", "installed", "expected"),
    [
        ("cpu", torch.bfloat16, (9, 0), True, None),
        ("cuda", torch.float32, (9, 0), True, None),
        ("cuda", torch.bfloat16, (7, 5), True, None),
        ("cuda", torch.bfloat16, (9, 0), False, "varlen"),
        ("cuda", torch.bfloat16, (8, 0), True, "flash_attn"),
    ],
)
def test_a_kernel_is_taken_where_one_can_compute_it(
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    dtype: torch.dtype,
    capability: tuple[int, int],
    installed: bool,
    expected: str | None,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(attention, "find_spec", lambda _: installed or None)
    found = attention.kernel_for(torch.device(device), dtype=dtype)
    assert (found[0] if found else None) == expected


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand-ins for kernels that need a GPU, with torch's own signature, and the documented one of flash-attn."""
    signature = inspect.signature(varlen.varlen_attn)

    def torch_kernel(*args: Any, **kwargs: Any) -> torch.Tensor:
        given = signature.bind(*args, **kwargs).arguments
        assert given["enable_gqa"] is True
        assert torch.equal(given["cu_seq_q"], given["cu_seq_k"])
        assert given["max_q"] == given["max_k"]
        return _computed(
            given["query"], given["key"], given["value"], given["cu_seq_q"], given["max_q"], given["scale"],
            given["window_size"],
        )  # fmt: skip

    def flash_kernel(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor,
        cu_seqlens_k: torch.Tensor, max_seqlen_q: int, max_seqlen_k: int, dropout_p: float = 0.0,
        softmax_scale: float | None = None, causal: bool = False, window_size: tuple[int, int] = (-1, -1),
    ) -> torch.Tensor:  # fmt: skip
        assert causal
        assert torch.equal(cu_seqlens_q, cu_seqlens_k)
        assert (max_seqlen_q, dropout_p) == (max_seqlen_k, 0.0)
        return _computed(q, k, v, cu_seqlens_q, max_seqlen_q, softmax_scale, window_size)

    monkeypatch.setattr(varlen, "varlen_attn", torch_kernel)
    package = ModuleType("flash_attn")
    package.flash_attn_varlen_func = flash_kernel  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn", package)


def _computed(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    borders: torch.Tensor,
    longest: int,
    scale: float | None,
    window: tuple[int, int],
) -> torch.Tensor:
    before, after = window
    assert after == 0
    last = None if before < 0 else before + 1
    reading = Reading(borders_P1=borders, longest=longest, scale=scale, window=last)
    return piece_by_piece(query, key, value, reading)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("kernel", [attention.torch_varlen, attention.flash_attn])
@pytest.mark.parametrize("window", [None, 3])
def test_both_kernels_are_told_the_same(kernel: attention.Kernel, window: int | None) -> None:
    query, key, value = (torch.randn(9, heads, 4) for heads in (4, 2, 2))
    reading = Reading(borders_P1=torch.tensor([0, 2, 9]), longest=7, scale=0.3, window=window)
    assert torch.equal(kernel(query, key, value, reading), piece_by_piece(query, key, value, reading))


def test_a_mask_is_kept_where_it_is_wanted(make_policy: MakePolicy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharding, "kernel_for", lambda *_, **__: ("reference", piece_by_piece))
    taken = make_policy(placement=Placement())
    masked = make_policy(placement=Placement(attention="mask"))
    assert _kinds(taken, masked) == ["astraflow_reference", "sdpa"]


def _kinds(*policies: PolicyModel) -> list[str]:
    return [str(policy.causal_lm.config._attn_implementation) for policy in policies]
