"""A device that is not there is refused, and one that fails is named."""

import pytest
import torch

from astraflow.errors import InvalidArgumentError, UnavailableError
from astraflow_trainer.ranks.device import CPU, device_fault, training_device


def test_the_cpu_is_what_is_there_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert training_device("auto", local_rank=3) == training_device("cpu", local_rank=0) == CPU
    with pytest.raises(InvalidArgumentError, match=r"ASTRAFLOW_DEVICE is cuda, and torch .* sees no GPU"):
        training_device("cuda", local_rank=0)


def test_local_rank_counts_to_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    assert training_device("auto", local_rank=1) == torch.device("cuda:1")
    assert chosen == [torch.device("cuda:1")]
    with pytest.raises(
        InvalidArgumentError, match=r"LOCAL_RANK 2 needs GPU 2, and this machine shows 2 \(0 to 1\)"
    ):
        training_device("cuda", local_rank=2)


def test_a_fault_of_the_device_is_named() -> None:
    gpu = torch.device("cuda:1")
    lost = device_fault(torch.AcceleratorError("CUDA error: unspecified launch failure"), device=gpu, rank=3)
    assert isinstance(lost, UnavailableError)
    assert "rank 3 lost cuda:1: CUDA error: unspecified launch failure" in lost.message
    full = device_fault(torch.OutOfMemoryError("tried to allocate 2 GiB"), device=gpu, rank=3)
    assert isinstance(full, InvalidArgumentError)
    assert "Lower trainer.tokens_per_microbatch" in full.message
    assert device_fault(RuntimeError("gloo: connection closed"), device=gpu, rank=3) is None
