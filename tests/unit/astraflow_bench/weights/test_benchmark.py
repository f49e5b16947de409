"""The weight benchmark at toy size: every figure is there, and each encoding is checked before it is reported."""

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from astraflow_bench.commands.bench import app
from astraflow_bench.weights.benchmark import WeightsReport, delta_bytes
from astraflow_bench.weights.experts import expert_bytes, expert_step
from astraflow_bench.weights.model_pairs import learning_rate_of, simulated, to_bf16, trained
from astraflow_bench.weights.peer_encodings import PEERS, PeerEncoding
from astraflow_bench.weights.targets import targets

pytestmark = pytest.mark.slow


QUICK = ("weights", "--elements", "65536", "--repeats", "1", "--train-steps", "0", "--learning-rate", "1e-6")


@pytest.mark.parametrize("peer", PEERS, ids=lambda peer: peer.name)
def test_encodings_of_peers_come_back(peer: PeerEncoding) -> None:
    draw = np.random.default_rng(0)
    base = draw.integers(0, 2**16, 300_000).astype(np.uint16)
    target = base.copy()
    target[[0, 5, 70_000, 70_001, 299_999]] += 3
    mirror = base.copy()
    peer.apply(mirror, peer.encode(base, target))
    assert np.array_equal(mirror, target)


def test_rounding_is_to_the_nearest_even() -> None:
    values = np.array([1.0, 1.00390625, 1.01171875, -1.00390625], np.float32)
    assert [hex(bits) for bits in to_bf16(values)] == ["0x3f80", "0x3f80", "0x3f82", "0xbf80"]


def test_a_larger_learning_rate_moves_more_weights() -> None:
    density = [
        delta_bytes(simulated(num_elements=2**17, learning_rate=rate, num_versions=2, seed=0))["density"]
        for rate in (1e-6, 1e-5)
    ]
    assert 0.005 < density[0] < 0.02 < density[1] < 0.1


def test_our_deltas_are_smaller_than_those_of_peers() -> None:
    figures = delta_bytes(simulated(num_elements=2**19, learning_rate=1e-6, num_versions=2, seed=0))
    ours = figures["bytes_per_change"]["rice_ctx"]
    assert figures["bytes_per_change"]["rice"] > ours
    assert all(over["rice"] < 1 for over in figures["over_peer"].values())


def test_a_model_that_is_trained_moves_too() -> None:
    (versions,) = trained(learning_rates=[1e-5], warm_up_steps=1, steps=2, seed=0)
    assert 0 < delta_bytes(versions)["density"] < 0.5


def test_the_command_prints_every_documented_field() -> None:
    result = CliRunner().invoke(app, [*QUICK, "--json"])
    report = json.loads(result.stdout)
    documented = (
        "kernel num_elements memcpy_bytes_per_s deltas cpu two_threads merge snapshot experts targets"
    )
    assert set(report) == set(documented.split())
    assert report["merge"]["span"] == 8
    assert {figures["path"] for figures in report["cpu"]} >= {"numpy", "peer"}
    assert result.exit_code == (0 if all(target["met"] for target in report["targets"]) else 1)


def test_a_learning_rate_is_found_for_a_density() -> None:
    rate = learning_rate_of(0.02, seed=1)
    pair = simulated(num_elements=2**18, learning_rate=rate, num_versions=2, seed=1)
    assert delta_bytes(pair)["density"] == pytest.approx(0.02, rel=0.02)
    with pytest.raises(ValueError, match=r"density of 0.7 cannot be simulated"):
        learning_rate_of(0.7, seed=1)


def test_the_command_writes_a_page_with_every_verdict(tmp_path: Path) -> None:
    CliRunner().invoke(app, [*QUICK, "--density", "0.05", "--write", str(tmp_path)])
    found = json.loads((tmp_path / "weights-bench.json").read_text())
    page = (tmp_path / "weights-bench.md").read_text()
    assert set(found["origin"]) == {"machine", "date", "commit"}
    assert "--density 0.05 --write docs/results" in found["command"]
    assert [figures["source"] for figures in found["deltas"]] == ["simulated"] * 2
    for target in found["targets"]:
        verdict = "met" if target["met"] else "MISSED"
        assert f"| {target['name']} | {target['measured']:.3f} | {target['limit']:.3f} | {verdict} |" in page


def test_a_small_trained_model_is_judged_without_framing_and_a_large_one_by_its_share() -> None:
    figures = {
        "num_elements": 200_000_000,
        "density": 0.01,
        "learning_rate": 1e-5,
        "framing_share": {"rice": 0.1, "rice_ctx": 0.2},
        "rice_over_bound": 1.1,
        "rice_ctx_over_bound": 0.8,
        "rice_ctx_over_context_bound": 1.2,
    }
    report = WeightsReport(kernel="", num_elements=1)
    report.merge, report.snapshot = {"over_sum": 0.5}, {"over_safetensors": 0.7, "verify": 0.5}
    report.deltas = [figures | {"source": "simulated"}, figures | {"source": "trained", "num_elements": 5}]
    found = {target.name: target for target in targets(report)}
    assert found["RICE / entropy bound, simulated, 1.00 %"].measured == pytest.approx(1.1)
    assert found["RICE / entropy bound, trained, 1.00 %"].measured == pytest.approx(0.99)
    assert not found["framing and digests / RICE_CTX delta, simulated, 1.00 %"].met
    assert "framing and digests / RICE_CTX delta, trained, 1.00 %" not in found
    assert not found["snapshot / safetensors"].met


def test_experts_that_are_touched_little_cost_less_than_those_of_a_peer_with_all_framing() -> None:
    step = expert_step(density=1e-4, matrix=(128, 256), seed=0)
    figures = expert_bytes(step, density=1e-4, seed=0)
    assert figures["tensors"] == 4 * figures["touched_tensors"] == 3 * 128
    framed, bodies = figures["bytes_per_change"], figures["body_bytes_per_change"]
    assert all(framed[name] > bodies[name] for name in framed)
    assert framed["rice"] < framed["u16 gaps + XOR + zstd-1"]
    together = figures["parts_bytes_per_change"] + figures["manifest_bytes_per_change"]
    assert framed["rice"] == pytest.approx(together)
