"""Impossible losses are refused, and every recipe name has a form."""

import pytest

from astraflow_trainer.step.losses import (
    TRUST_REGIONS,
    Cispo,
    DualClip,
    KlSettings,
    LossSettings,
    M2po,
    PpoClip,
    ProximalAnchor,
    TrustRegionName,
)


def test_every_name_builds_its_trust_region_from_defaults() -> None:
    assert set(TRUST_REGIONS) == set(TrustRegionName)
    for form in TRUST_REGIONS.values():
        LossSettings(trust_region=form())


def test_the_default_is_the_authors_m2po() -> None:
    assert LossSettings().trust_region == M2po(budget=0.04, floor_low=0.3, floor_high=0.5)


@pytest.mark.parametrize(
    ("build", "complaint"),
    [
        (lambda: PpoClip(low=1.5), "low 1.5 must be within 0 and 1"),
        (lambda: DualClip(cap=1.0), "cap 1.0 must be above 1"),
        (lambda: M2po(budget=0.0), "budget 0.0 must be above 0"),
        (lambda: Cispo(min_ratio=2.0), "must enclose 1"),
        (lambda: KlSettings(coefficient=0.0), "leave kl unset"),
        (lambda: ProximalAnchor(weight_cap=0.0), "weight_cap 0.0"),
        (lambda: LossSettings(constant_length=0), "constant_length 0"),
    ],
)
def test_bounds_are_checked(build: object, complaint: str) -> None:
    assert callable(build)
    with pytest.raises(ValueError, match=complaint):
        build()
