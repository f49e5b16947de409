"""Which device this rank computes on.

Invariant: one GPU a rank, the one that LOCAL_RANK counts to; what cannot be is refused before any memory is taken, and
never replaced by something slower. fp32 products are full fp32 everywhere: TF32 keeps 10 of 23 bits of a
number, which is less than what rounding the weights to bf16 is compared with. The trainer's server asks at start.
"""

from typing import Literal

import torch

from astraflow.errors import AstraflowError, InvalidArgumentError, UnavailableError

DeviceChoice = Literal["auto", "cpu", "cuda"]
CPU = torch.device("cpu")


def training_device(wanted: DeviceChoice, *, local_rank: int) -> torch.device:
    """The device of the rank that is the `local_rank`-th of its machine, made the current one.

    `auto` is a GPU where torch sees one, else the CPU. Raises InvalidArgumentError where there is no such GPU.
    """
    torch.set_float32_matmul_precision("highest")
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return CPU
    if not torch.cuda.is_available():
        raise InvalidArgumentError(
            f"ASTRAFLOW_DEVICE is cuda, and torch {torch.__version__} sees no GPU: install a torch with CUDA and "
            "look at `nvidia-smi` and CUDA_VISIBLE_DEVICES, or set it to cpu"
        )
    num_devices = torch.cuda.device_count()
    if local_rank >= num_devices:
        raise InvalidArgumentError(
            f"LOCAL_RANK {local_rank} needs GPU {local_rank}, and this machine shows {num_devices} (0 to "
            f"{num_devices - 1}): start at most {num_devices} ranks here, or set ASTRAFLOW_DEVICE to cpu"
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def device_fault(error: BaseException, *, device: torch.device, rank: int) -> AstraflowError | None:
    """What a failure of the device means for this rank; None where `error` is none.

    A GPU that is gone may be there after a restart, from the last checkpoint; memory that is too small will not be.
    """
    if isinstance(error, torch.OutOfMemoryError):
        return InvalidArgumentError(
            f"rank {rank} has too little memory on {device}: {error}. Lower trainer.tokens_per_microbatch, set "
            "ASTRAFLOW_ACTIVATION_CHECKPOINTING to full or ASTRAFLOW_OFFLOAD to true, or take more ranks"
        )
    if isinstance(error, torch.AcceleratorError):
        return UnavailableError(
            f"rank {rank} lost {device}: {error}. All ranks start again from the last checkpoint; where it happens "
            "again, look at `nvidia-smi -q` and `dmesg` for the GPU's own error"
        )
    return None
