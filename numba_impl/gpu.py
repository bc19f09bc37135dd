"""Facts about a CUDA device and the installation, asked once, and torch's current stream."""

import functools
import warnings
from dataclasses import dataclass

import torch

MINIMUM_CAPABILITY = (8, 0)  # cp.async, min.NaN and max.NaN


@dataclass(frozen=True)
class Gpu:
    """What plans depend on; sizes in bytes."""

    capability: tuple[int, int]
    multiprocessors: int
    shared_per_block: int
    shared_per_multiprocessor: int


SIMULATED = Gpu((8, 0), 1, 163 * 1024, 164 * 1024)  # stands for the CPU, on which Numba's simulator runs kernels


@functools.lru_cache
def of(device) -> Gpu:
    """The facts of a CUDA device."""
    if device.type == "cpu":
        return SIMULATED
    found = torch.cuda.get_device_properties(device)
    limits = found.multi_processor_count, found.shared_memory_per_block_optin, found.shared_memory_per_multiprocessor
    return Gpu(torch.cuda.get_device_capability(device), *limits)


def why_no_kernels(device) -> str:
    """Why the kernels cannot be compiled or run on a device with this installation; empty if they can."""
    if device.type != "cuda":
        return f"x is on {device}, not on a CUDA device"
    capability = of(device).capability
    if capability < MINIMUM_CAPABILITY:
        return f"compute capability {capability} of {device} is below {MINIMUM_CAPABILITY}"
    return missing_libraries()


@functools.lru_cache
def missing_libraries() -> str:
    """Why kernels cannot be compiled here; empty if they can. Warns the first time, since eager torch then serves GPUs."""
    try:
        from cuda.bindings import nvjitlink
        from numba.cuda.cudadrv.nvvm import NVVM

        NVVM()
        nvjitlink.version()
    except Exception as error:
        extra = f"cu{torch.version.cuda.split('.')[0]}"
        reason = f"the extra {extra} is missing, the CUDA compiler libraries: pip install 'numba-cuda[{extra}]' ({error})"
        warnings.warn(f"numba_impl runs in eager PyTorch: {reason}", RuntimeWarning, stacklevel=2)
        return reason
    return ""


def record_stream(*tensors):
    """Keep the memory of tensors, or None, from being given to others until a side stream that is current has used it."""
    device = tensors[0].device
    if torch._C._cuda_getCurrentRawStream(device.index):  # the default stream's handle is 0
        stream = torch.cuda.current_stream(device)
        for tensor in tensors:
            if tensor is not None:
                tensor.record_stream(stream)
