"""Versions that carry what a trainer answers by their weights, so that whoever loads them must prove that it did."""

from collections.abc import Mapping
from pathlib import Path

import torch
from transformers import PreTrainedModel

from astraflow.dataflow.v1 import version_pb2
from astraflow_trainer.model.model import PolicyModel
from astraflow_trainer.publish.probing import Prober
from astraflow_trainer.ranks.reductions import OneRank
from astraflow_weights.codec.tensors import Array
from astraflow_weights.versions.probe import Probe
from support.node_process import WeightPublisher
from support.tiny_models import load_reference, widened


def probe_of(model: PreTrainedModel) -> Probe:
    """What a trainer of this model publishes of its answers."""
    probe = Prober(PolicyModel(model), ranks=OneRank()).answers()
    assert probe is not None
    return probe


class Published:
    """Publishes versions with their probes, and keeps the newest one's model."""

    def __init__(self, trainer: WeightPublisher, checkpoint: Path) -> None:
        self._trainer = trainer
        self.model = load_reference(checkpoint)

    def next(self) -> version_pb2.Version:
        """Commit the next version."""
        return self._trainer.publish(probe=self._answers)

    @torch.no_grad()
    def _answers(self, bits: Mapping[str, Array]) -> Probe:
        for name, parameter in PolicyModel(self.model).hf_parameters():
            parameter.copy_(widened(bits[name]))
        return probe_of(self.model)
