"""LoRA adapters: the numbers of peft, each request under its own, refused when they would be others."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from astraflow_engine import scheduler
from astraflow_engine.adapters import load_adapter
from astraflow_engine.core import CoreLimits, EngineCore
from astraflow_engine.errors import InvalidRequest, ModelError
from astraflow_engine.model_config import ModelConfig, load_model_config
from astraflow_engine.requests import Completion, GenerateRequest, SamplingParams
from astraflow_engine.weights import load_weights
from support import manual_clock, tiny_models

TOLERANCE = 1e-4
PROMPTS = [tuple(range(3 + i, 3 + i + length)) for i, length in enumerate([17, 9, 30, 12, 5, 20])]


@pytest.fixture(autouse=True)
def inference_mode() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.fixture(scope="module", params=["llama", "qwen2", "qwen3"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = tiny_models.TinyShape(model_type=request.param)
    return tiny_models.save_tiny_model(tmp_path_factory.mktemp("model"), shape=shape)


@pytest.fixture(scope="module")
def adapters(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two adapters of other sizes, the second without those of the feed-forward products and of the keys."""
    folders = {name: tmp_path_factory.mktemp(name) for name in ("all", "some")}
    with torch.inference_mode(mode=False):
        tiny_models.save_tiny_adapter(folders["all"], model=model, seed=1)
        modules = ["q_proj", "v_proj", "o_proj"]
        tiny_models.save_tiny_adapter(folders["some"], model=model, seed=2, rank=2, target_modules=modules)
    return folders


@pytest.fixture
def config(model: Path) -> ModelConfig:
    return load_model_config(model)


@pytest.fixture
def core(model: Path, config: ModelConfig, adapters: dict[str, Path]) -> EngineCore:
    admission = scheduler.AdmissionLimits(max_waiting=64, max_prefill_tokens=200)
    limits = CoreLimits(num_slots=6, capacity=96, admission=admission, pass_tokens=16)
    weights = load_weights(model, config=config)
    core = EngineCore(config, weights, limits=limits, seed=0, version="0", clock=manual_clock.ManualClock())
    for name, folder in adapters.items():
        core.load_adapter(name, load_adapter(folder, config=config))
    return core


def ask(rid: str, prompt: tuple[int, ...], *, adapter: str = "") -> GenerateRequest:
    params = SamplingParams(max_new_tokens=12, temperature=0.0, ignore_eos=True)
    return GenerateRequest(rid=rid, prompt=prompt, params=params, adapter=adapter)


def run(core: EngineCore, *requests: GenerateRequest) -> dict[str, Completion]:
    for request in requests:
        core.submit(request)
    found: dict[str, Completion] = {}
    while core.has_work:
        found |= {each.request.rid: each for each in core.step()}
    return found


def expected(model: Path, folder: Path | None, prompt: tuple[int, ...]) -> tuple[list[int], list[float]]:
    reference = (
        tiny_models.load_adapted_reference(folder, model=model)
        if folder
        else tiny_models.load_reference(model)
    )
    tokens = tiny_models.reference_greedy(reference, prompt, num_tokens=12)
    return tokens, tiny_models.reference_logprobs(reference, prompt, tokens)


def test_each_request_of_a_batch_is_answered_under_its_own_adapter(
    core: EngineCore, model: Path, adapters: dict[str, Path]
) -> None:
    names = ["all", "some", "", "all", "", "some"]
    requests = [
        ask(f"r{i}", prompt, adapter=name)
        for i, (prompt, name) in enumerate(zip(PROMPTS, names, strict=True))
    ]
    found = run(core, *requests)
    for request in requests:
        tokens, logprobs = expected(model, adapters.get(request.adapter), request.prompt)
        assert list(found[request.rid].tokens) == tokens
        assert found[request.rid].logprobs == pytest.approx(logprobs, abs=TOLERANCE)


def test_prefixes_are_not_shared_between_adapters(
    core: EngineCore, model: Path, adapters: dict[str, Path]
) -> None:
    for adapter in ("", "all", "some"):
        answer = run(core, ask(f"first {adapter}", PROMPTS[0], adapter=adapter))
        assert answer[f"first {adapter}"].cached_tokens == 0
        again = run(core, ask(f"again {adapter}", PROMPTS[0], adapter=adapter))[f"again {adapter}"]
        assert again.cached_tokens > 0
        tokens, logprobs = expected(model, adapters.get(adapter), PROMPTS[0])
        assert list(again.tokens) == tokens
        assert again.logprobs == pytest.approx(logprobs, abs=TOLERANCE)


def test_a_request_ends_with_the_adapter_it_began_with(
    core: EngineCore, config: ModelConfig, model: Path, adapters: dict[str, Path]
) -> None:
    core.submit(ask("before", PROMPTS[0], adapter="all"))
    core.step()
    core.unload_adapter("all")
    core.load_adapter("all", load_adapter(adapters["some"], config=config))
    found = run(core, ask("after", PROMPTS[0], adapter="all"))
    assert list(found["before"].tokens) == expected(model, adapters["all"], PROMPTS[0])[0]
    assert list(found["after"].tokens) == expected(model, adapters["some"], PROMPTS[0])[0]
    assert found["after"].cached_tokens == 0


def test_names_are_known_once(core: EngineCore, config: ModelConfig, adapters: dict[str, Path]) -> None:
    with pytest.raises(InvalidRequest, match="adapter 'all' is loaded; unload it first"):
        core.load_adapter("all", load_adapter(adapters["all"], config=config))
    with pytest.raises(InvalidRequest, match="adapter 'none' is not loaded, loaded are: all, some"):
        core.submit(ask("r", PROMPTS[0], adapter="none"))
    with pytest.raises(InvalidRequest, match="adapter 'none' is not loaded"):
        core.unload_adapter("none")


def _fields(**changed: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "adapter_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changed}))

    return change


def _tensors(change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        tensors = load_file(folder / "adapter_model.safetensors")
        change(tensors)
        save_file(tensors, folder / "adapter_model.safetensors")

    return apply


FIRST = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"

REFUSED: list[tuple[str, Callable[[Path], None], str]] = [
    ("no configuration", lambda folder: (folder / "adapter_config.json").unlink(), "is no configuration"),
    ("not JSON", lambda folder: (folder / "adapter_config.json").write_text("{") and None, "is no configuration"),
    ("another method", _fields(peft_type="IA3"), "peft_type is 'IA3', the CPU engine adds plain LoRA"),
    ("DoRA", _fields(use_dora=True), "use_dora is True"),
    ("rsLoRA", _fields(use_rslora=True), "use_rslora is True"),
    ("biases", _fields(bias="all"), "bias is 'all'"),
    ("whole modules", _fields(modules_to_save=["lm_head"]), r"modules_to_save is \['lm_head'\]"),
    ("ranks that differ", _fields(rank_pattern={"q_proj": 2}), "rank_pattern is"),
    ("a rank of nothing", _fields(r=0), "r is 0, expected 1 to 1024"),
    ("another rank", _fields(r=3), r"has shape \(4, 48\), the served model needs \(3, 48\)"),
    ("no tensors", lambda folder: (folder / "adapter_model.safetensors").unlink(), "holds no tensors"),
    ("half a pair", _tensors(lambda tensors: tensors.pop(FIRST)), "lora_A and .lora_B only"),
    ("NaN", _tensors(lambda tensors: tensors[FIRST].fill_(float("nan"))), "holds NaN"),
    ("an unknown place", _tensors(lambda tensors: tensors.update(x=torch.zeros(1))), "is not part of the model"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "message"), [row[1:] for row in REFUSED], ids=[row[0] for row in REFUSED])
def test_what_would_change_the_numbers_is_refused_by_name(
    tmp_path: Path, change: Callable[[Path], None], message: str
) -> None:
    with torch.inference_mode(mode=False):
        model = tiny_models.save_tiny_model(tmp_path / "model")
        folder = tiny_models.save_tiny_adapter(tmp_path / "adapter", model=model)
    change(folder)
    with pytest.raises(ModelError, match=message):
        load_adapter(folder, config=load_model_config(model))
