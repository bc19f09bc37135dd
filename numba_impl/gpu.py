"""What the CUDA backends need of a call and of the installation."""

import functools
import warnings

import torch

from numba_impl.problem import Problem

MINIMUM_CAPABILITY = (8, 0)  # cp.async, min.NaN and max.NaN
# Where it may, cuDNN uses TF32 from so many cells times input channels on, with less than 16 of them and with more. That is sure
# for a kernel, stride and padding, and for multiples of 8 up to 64 channels (cuDNN 9.19, H200).
TF32_AXIS, TF32_WORK = (3, 2, 1), (2**21, 2**18)


def serves(problem: Problem) -> tuple[bool, str]:
    """Whether kernels of ours can serve the call at all, and if not, why."""
    ok, reason = runs_kernels(problem.device)
    return problem.plain_fp32() if ok else (ok, reason)


def runs_kernels(device) -> tuple[bool, str]:
    """Whether the device and this installation can compile and run the kernels, and if not, why."""
    if device.type != "cuda":
        return False, f"x is on {device}, not on a CUDA device"
    if capability(device) < MINIMUM_CAPABILITY:
        return False, f"compute capability {capability(device)} of {device} is below {MINIMUM_CAPABILITY}"
    missing = missing_libraries()
    return missing is None, missing or ""


def precision(problem: Problem) -> str:
    """TF32 where it is asked for, or permitted and, as far as is known, used by cuDNN too; elsewhere fp32 costs nothing."""
    axes, channels = (problem.geometry.rows, problem.geometry.cols), (problem.in_channels, problem.out_channels)
    known = all((axis.kernel_size, axis.stride, axis.padding) == TF32_AXIS for axis in axes)
    known = known and all(count % 8 == 0 and count <= 64 for count in channels)
    return cudnn_precision(problem) if problem.by_flags and known else problem.precision


def cudnn_precision(problem: Problem) -> str:
    """In which precision cuDNN is expected to compute."""
    work = problem.batch * problem.height * problem.width * problem.in_channels
    return "fp32" if work < TF32_WORK[problem.in_channels >= 16] else problem.precision


def record_stream(*tensors):
    """Keep the memory of tensors, or None, from being given to others until a side stream that is current has used it."""
    device = tensors[0].device
    if torch._C._cuda_getCurrentRawStream(device.index):  # the default stream's handle is 0
        stream = torch.cuda.current_stream(device)
        for tensor in tensors:
            if tensor is not None:
                tensor.record_stream(stream)


@functools.lru_cache
def capability(device):
    return torch.cuda.get_device_capability(device)


@functools.lru_cache
def missing_libraries():
    """Why kernels cannot be compiled here, or None; warns the first time, since the GPU is then served by eager torch."""
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
    return None
