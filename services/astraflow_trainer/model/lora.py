"""LoRA adapters of a model, made by peft: the only parameters that are trained and published.

Invariant: every rank, and every start, begins with the same adapter; the file that travels with each version says all
that an engine needs to add it (arXiv 2106.09685: W + alpha / rank · B · A, with B zero at first). Called by the learner
and the session.
"""

import json
from pathlib import Path
from typing import cast

import torch
import transformers

from astraflow.recipe import LoraSettings

CONFIG_FILE = "adapter_config.json"


def adapted(
    causal_lm: transformers.PreTrainedModel, settings: LoraSettings, *, seed: int
) -> transformers.PreTrainedModel:
    """The model with an adapter of float32 parameters that depend on `seed` only; its own parameters are frozen."""
    import peft  # here: a second of imports that most trainers do without

    config = peft.LoraConfig(
        r=settings.rank,
        lora_alpha=cast("int", settings.alpha),  # peft computes with any number
        target_modules=list(settings.modules),
        task_type="CAUSAL_LM",
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        # It answers as the model that it adapts does.
        return cast("transformers.PreTrainedModel", peft.get_peft_model(causal_lm, config))


def write_adapter_config(settings: LoraSettings, folder: Path) -> Path:
    """Write what peft and engines read beside the tensors, the same bytes each time; returns the file."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / CONFIG_FILE
    content = {
        "base_model_name_or_path": None,
        "bias": "none",
        "lora_alpha": settings.alpha,
        "lora_dropout": 0.0,
        "peft_type": "LORA",
        "r": settings.rank,
        "target_modules": list(settings.modules),
        "task_type": "CAUSAL_LM",
    }
    path.write_text(json.dumps(content, indent=2) + "\n")
    return path
