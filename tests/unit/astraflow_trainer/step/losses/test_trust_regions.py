"""Every name of the loss kernel against its formula, written here again in plain Python on float64 numbers."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, get_args

import pytest
import torch

from astraflow.recipe import algorithm
from astraflow.recipe.section import kind_of
from astraflow_trainer.ranks.reductions import OneRank
from astraflow_trainer.step import losses
from astraflow_trainer.step.losses.aggregation import StepCounts, token_weights

ROWS = [0, 0, 0, 1, 1, 2, 2, 2, 2, 3, 3]
ADVANTAGES = [1.0] * 3 + [-2.0] * 2 + [0.5] * 4 + [-1.0] * 2
BEHAVIOR = [-9.0, -1.0, -0.5, -3.0, -0.4, -1.5, -2.5, -0.1, -0.7, -2.0, -1.0]
SHIFTS = [2.1, 0.3, -0.5, -0.001, 1.4, 0.2, 0.6, 0.05, -0.9, -1.6, -0.7]
"""Of the policy from the sampler, and of the start of the step by a third as much."""


@dataclass(frozen=True)
class Token:
    """One token as the formulas have it."""

    l: float  # noqa: E741
    anchor: float
    mu: float
    start: float
    A: float
    row: int

    @property
    def r(self) -> float:
        """The ratio to the anchor."""
        return math.exp(self.l - self.anchor)


Formula = Callable[[Sequence[Token]], list[tuple[float, float]]]
"""Value and slope in l of each token, given all of a step."""


def _each(of: Callable[[Token], tuple[float, float]]) -> Formula:
    return lambda tokens: [of(token) for token in tokens]


def _clip(r: float, A: float, low: float, high: float) -> tuple[float, float]:
    whole, cut = -r * A, -min(max(r, 1 - low), 1 + high) * A
    return (whole, whole) if whole >= cut else (cut, 0.0)


def _none(token: Token) -> tuple[float, float]:
    return -token.r * token.A, -token.r * token.A


def _dual(token: Token) -> tuple[float, float]:
    value, slope = _clip(token.r, token.A, 0.2, 0.28)
    cap = -3.0 * token.A
    return (cap, 0.0) if token.A < 0 and value > cap else (value, slope)


def _row_mean(tokens: Sequence[Token], row: int, of: Callable[[Token], float]) -> float:
    values = [of(token) for token in tokens if token.row == row]
    return sum(values) / len(values)


def _gspo(tokens: Sequence[Token]) -> list[tuple[float, float]]:
    means = [math.exp(_row_mean(tokens, t.row, lambda o: o.l - o.anchor)) for t in tokens]
    return [_clip(s, t.A, 3e-4, 4e-4) for s, t in zip(means, tokens, strict=True)]


def _gmpo(tokens: Sequence[Token]) -> list[tuple[float, float]]:
    def cut(t: Token) -> float:
        sign = math.copysign(1.0, t.A)
        return sign * min(sign * (t.l - t.anchor), 0.4)

    result = []
    for t in tokens:
        value = -math.exp(_row_mean(tokens, t.row, cut)) * t.A
        result.append((value, value if cut(t) == t.l - t.anchor else 0.0))
    return result


def _cispo(token: Token) -> tuple[float, float]:
    weight = min(token.r, 5.0) * token.A
    return -weight * token.l, -weight


def _sapo(token: Token) -> tuple[float, float]:
    tau = 1.0 if token.A > 0 else 1.05
    gate = 1 / (1 + math.exp(-tau * (token.r - 1)))
    return -4 / tau * gate * token.A, -4 * gate * (1 - gate) * token.r * token.A


def _dppo(token: Token) -> tuple[float, float]:
    gained = math.exp(token.l) - math.exp(token.mu)
    out = gained > 0.2 if token.A > 0 else gained < -0.2
    return (0.0, 0.0) if out else _none(token)


def _away(tokens: Sequence[Token]) -> list[float]:
    return sorted((t.l - t.anchor) ** 2 for t in tokens if (t.l - t.anchor) * t.A > 0)


def _m2po(tokens: Sequence[Token]) -> list[tuple[float, float]]:
    squares = _away(tokens)
    low, high = 0.0, max(squares)
    for _ in range(200):
        middle = (low + high) / 2
        within = sum(min(square, middle) for square in squares) / len(squares) <= 0.04
        low, high = (middle, high) if within else (low, middle)
    t = math.sqrt(low)
    bounds = max(1 - math.exp(-t), 0.3), max(math.exp(t) - 1, 0.5)
    return [_clip(token.r, token.A, *bounds) for token in tokens]


def _m2po_clip(tokens: Sequence[Token]) -> list[tuple[float, float]]:
    squares = _away(tokens)[::-1]
    means = [sum(squares[j:]) / len(squares[j:]) for j in range(len(squares))]
    k = next((j for j, mean in enumerate(means) if mean < 0.01), len(squares) - 1)
    t = math.sqrt(squares[k])
    return [_clip(token.r, token.A, 1 - math.exp(-t), math.exp(t) - 1) for token in tokens]


def _m2po_mask(tokens: Sequence[Token]) -> list[tuple[float, float]]:
    kept = sorted(((t.l - t.anchor) ** 2, i) for i, t in enumerate(tokens))
    while sum(square for square, _ in kept) / len(kept) >= 0.04:
        kept.pop()
    places = {i for _, i in kept}
    return [_none(t) if i in places else (0.0, 0.0) for i, t in enumerate(tokens)]


LOSSES: dict[str, Formula] = {
    "none": _each(_none),
    "ppo_clip": _each(lambda t: _clip(t.r, t.A, 0.2, 0.28)),
    "dual_clip": _each(_dual),
    "m2po": _m2po,
    "m2po_clip": _m2po_clip,
    "m2po_mask": _m2po_mask,
    "gspo": _gspo,
    "gmpo": _gmpo,
    "cispo": _each(_cispo),
    "sapo": _each(_sapo),
    "dppo": _each(_dppo),
    "sft": _each(lambda t: (-t.l, -1.0)),
}


def _product(tokens: Sequence[Token], row: int, of: Callable[[Token], float]) -> float:
    return math.prod(of(token) for token in tokens if token.row == row)


def _start_ratio(token: Token) -> float:
    return math.exp(token.start - token.mu)


def _anchor_ratio(token: Token) -> float:
    return math.exp(token.anchor - token.mu)


WEIGHTS: dict[str, Callable[[Sequence[Token], Token], float]] = {
    "none": lambda _, t: 1.0,
    "tis": lambda _, t: min(_anchor_ratio(t), 2.0),
    "tis sequence": lambda all_, t: min(_product(all_, t.row, _anchor_ratio), 2.0),
    "mis": lambda all_, t: (
        _product(all_, t.row, _anchor_ratio) * (_product(all_, t.row, _start_ratio) <= 3.0)
    ),
    "mis token": lambda _, t: _anchor_ratio(t) * (_start_ratio(t) <= 3.0),
    "icepop": lambda _, t: _anchor_ratio(t) * (0.5 <= _start_ratio(t) <= 5.0),
}


def _k(estimator: str, token: Token) -> float:
    d = token.start - token.mu
    return {"k1": -d, "k2": d * d / 2, "k3": math.exp(d) - 1 - d}[estimator]


def _rejected_by_kl(tokens: Sequence[Token], t: Token, over: str, estimator: str) -> bool:
    of_row = [_k(estimator, token) for token in tokens if token.row == t.row]
    mean = sum(of_row) / len(of_row)
    values = {"token": abs(_k(estimator, t)), "mean": abs(mean), "max": max(map(abs, of_row))}
    return {**values, "sum": abs(sum(of_row))}[over] > 0.05


REJECTS: dict[str, tuple[dict[str, Any], Callable[[Sequence[Token], Token], bool]]] = {
    "geometric": (
        {"kind": "geometric", "low": 0.9, "high": 1.2},
        lambda all_, t: not 0.9 <= math.exp(_row_mean(all_, t.row, lambda o: o.start - o.mu)) <= 1.2,
    )
}
for _over in ("token", "mean", "max", "sum"):
    for _estimator in ("k1", "k2", "k3"):
        REJECTS[f"kl {_over} {_estimator}"] = (
            {"kind": "kl", "over": _over, "estimator": _estimator, "max": 0.05},
            lambda all_, t, over=_over, estimator=_estimator: _rejected_by_kl(all_, t, over, estimator),
        )

ANCHORS: dict[str, Callable[[float, float, float], float]] = {
    "behavior": lambda l, mu, start: mu,  # noqa: E741
    "proximal": lambda l, mu, start: start,  # noqa: E741
    "bypass": lambda l, mu, start: l,  # noqa: E741
}


def _tokens(anchor: str) -> list[Token]:
    """As the anchor has them: what nothing recomputes stands at the policy itself."""
    result = []
    for row, advantage, mu, shift in zip(ROWS, ADVANTAGES, BEHAVIOR, SHIFTS, strict=True):
        now = mu + shift
        start = mu + shift / 3 if anchor == "proximal" else now
        at = ANCHORS[anchor](now, mu, start)
        result.append(Token(l=now, anchor=at, mu=mu, start=start, A=advantage, row=row))
    return result


def _kernel(
    settings: algorithm.AlgorithmSettings, tokens: Sequence[Token], **more: list[float]
) -> tuple[float, list[float]]:
    """Value and gradient of the kernel, each token weighing 1."""
    columns = {
        name: torch.tensor([getattr(t, name) for t in tokens], dtype=torch.float64)
        for name in ("mu", "A", "start")
    }
    logprobs = torch.tensor([t.l for t in tokens], dtype=torch.float64, requires_grad=True)
    region = losses.resolve_region(
        logprobs,
        anchor_N=torch.tensor([t.anchor for t in tokens], dtype=torch.float64),
        advantage_N=columns["A"],
        settings=settings,
        ranks=OneRank(),
    )
    inputs = losses.LossInputs(
        row_N=torch.tensor([t.row for t in tokens]),
        num_rows=max(t.row for t in tokens) + 1,
        advantage_N=columns["A"],
        weight_N=torch.ones(len(tokens), dtype=torch.float64),
        behavior_N=columns["mu"],
        proximal_N=columns["start"] if isinstance(settings.anchor, algorithm.ProximalAnchor) else None,
        **{f"{name}_N": torch.tensor(values, dtype=torch.float64) for name, values in more.items()},
    )
    loss, _ = losses.policy_loss(logprobs, inputs=inputs, region=region, settings=settings)
    loss.backward()
    assert logprobs.grad is not None
    return float(loss.detach()), logprobs.grad.tolist()


def _expect(
    found: tuple[float, list[float]], values: Sequence[tuple[float, float]], *, tolerance: float = 1e-13
) -> None:
    assert found[0] == pytest.approx(sum(value for value, _ in values), rel=tolerance, abs=tolerance)
    assert found[1] == pytest.approx([slope for _, slope in values], rel=tolerance, abs=tolerance)


def test_every_name_has_a_formula_here() -> None:
    def kinds(union: Any) -> set[str | None]:
        return {kind_of(member) for member in get_args(union)}

    assert set(LOSSES) == kinds(algorithm.LossSettings)
    assert set(ANCHORS) == kinds(algorithm.Anchor)
    assert {name.split()[0] for name in WEIGHTS} == kinds(algorithm.AnyWeight)
    assert {name.split()[0] for name in REJECTS} == kinds(algorithm.AnyReject)
    assert set(AGGREGATIONS) == kinds(algorithm.Aggregation)
    assert set(KL) == {estimator.value for estimator in algorithm.KlEstimator}


@pytest.mark.parametrize("anchor", ["behavior", "proximal"])
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_by_its_name_has_the_published_value_and_gradient(name: str, anchor: str) -> None:
    settings = algorithm.AlgorithmSettings.model_validate(
        {"loss": name, "anchor": anchor, "mismatch": {"weight": "none"}}
    )
    tokens = _tokens(anchor)
    _expect(_kernel(settings, tokens), LOSSES[name](tokens), tolerance=1e-12)


@pytest.mark.parametrize("anchor", ANCHORS)
@pytest.mark.parametrize("name", WEIGHTS)
def test_a_weight_goes_with_every_anchor_and_multiplies_value_and_gradient(name: str, anchor: str) -> None:
    kind, _, level = name.partition(" ")
    weight = {"kind": kind} | ({"level": level} if level else {})
    settings = algorithm.AlgorithmSettings.model_validate(
        {"loss": "none", "anchor": anchor, "mismatch": {"weight": weight}}
    )
    tokens = _tokens(anchor)
    factors = [WEIGHTS[name](tokens, token) for token in tokens]
    expected = [
        (factor * value, factor * slope)
        for factor, (value, slope) in zip(factors, map(_none, tokens), strict=True)
    ]
    _expect(_kernel(settings, tokens), expected)


@pytest.mark.parametrize("anchor", ANCHORS)
@pytest.mark.parametrize("name", REJECTS)
def test_what_is_rejected_has_neither_value_nor_gradient(name: str, anchor: str) -> None:
    given, is_rejected = REJECTS[name]
    settings = algorithm.AlgorithmSettings.model_validate(
        {"loss": "none", "anchor": anchor, "mismatch": {"weight": "none", "reject": given}}
    )
    tokens = _tokens(anchor)
    out = [is_rejected(tokens, token) for token in tokens]
    assert any(out)
    expected = [(0.0, 0.0) if gone else _none(token) for gone, token in zip(out, tokens, strict=True)]
    _expect(_kernel(settings, tokens), expected)


def test_one_token_far_off_vetoes_its_row() -> None:
    settings = algorithm.AlgorithmSettings.model_validate(
        {"loss": "none", "mismatch": {"veto": {"low": 0.3, "high": 7.0}}}
    )
    tokens = _tokens("behavior")
    expected = [(0.0, 0.0) if token.row in (0, 3) else _none(token) for token in tokens]
    _expect(_kernel(settings, tokens), expected)


KL: dict[str, Callable[[float], tuple[float, float]]] = {
    "k1": lambda x: (-x, 1.0),
    "k2": lambda x: (x * x / 2, -x),
    "k3": lambda x: (math.exp(x) - 1 - x, 1 - math.exp(x)),
    "k3_k2": lambda x: (math.exp(x) - 1 - x, -x),
}
"""Value and slope in l of each estimate, x = l_ref − l."""


@pytest.mark.parametrize("name", KL)
def test_a_kl_term_and_an_entropy_bonus_are_added(name: str) -> None:
    settings = algorithm.AlgorithmSettings.model_validate(
        {
            "loss": "none",
            "kl": {"coefficient": 0.3, "estimator": name, "reference": "model"},
            "entropy": {"coefficient": 0.2},
        }
    )
    tokens = _tokens("behavior")
    reference = [token.l + 0.1 * place - 0.4 for place, token in enumerate(tokens)]
    entropy = [0.5 + place for place in range(len(tokens))]
    expected = []
    for token, against, h in zip(tokens, reference, entropy, strict=True):
        (value, slope), (kl, kl_slope) = _none(token), KL[name](against - token.l)
        expected.append((value + 0.3 * kl - 0.2 * h, slope + 0.3 * kl_slope))
    _expect(_kernel(settings, tokens, reference=reference, entropy=entropy), expected)


AGGREGATIONS: dict[str, Callable[[list[list[float]]], float]] = {
    "token_mean": lambda rows: sum(map(sum, rows)) / sum(map(len, rows)),
    "token_sum": lambda rows: sum(map(sum, rows)),
    "seq_mean_token_mean": lambda rows: sum(sum(row) / len(row) for row in rows) / len(rows),
    "seq_mean_token_sum": lambda rows: sum(map(sum, rows)) / len(rows),
    "constant": lambda rows: sum(map(sum, rows)) / (len(rows) * 50),
}


@pytest.mark.parametrize("name", AGGREGATIONS)
def test_an_aggregation_is_a_sum_of_weight_times_loss(name: str) -> None:
    given = {"kind": name} | ({"length": 50} if name == "constant" else {})
    settings = algorithm.AlgorithmSettings.model_validate({"aggregation": given})
    lengths = [len(list(row)) for _, row in groupby(ROWS)]
    counts = StepCounts(num_tokens=len(ROWS), num_rows=len(lengths))
    weights = token_weights(torch.tensor(lengths), counts=counts, aggregation=settings.aggregation).tolist()
    rows = [[value for value, row in zip(SHIFTS, ROWS, strict=True) if row == index] for index in range(4)]
    found = sum(weight * value for weight, row in zip(weights, rows, strict=True) for value in row)
    assert found == pytest.approx(AGGREGATIONS[name](rows), rel=1e-14)
