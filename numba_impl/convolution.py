"""Torch's own transposed convolution: the call, its gradients, and what is known of the precision and time of cuDNN's."""

import threading
from contextlib import contextmanager

import torch
import torch.nn.functional as F

from numba_impl import gpu
from numba_impl.problem import Geometry, Problem

# Where it may, cuDNN uses TF32 from so many cells times input channels on, with less than 16 of them and with more. That is sure
# for a kernel, stride and padding, and for multiples of 8 up to 64 channels (cuDNN 9.19, H200).
TF32_AXIS, TF32_WORK = (3, 2, 1), (2**21, 2**18)

# Measured on an H200 together with a pointwise kernel in place on the result: cycles to start, and operations a multiprocessor a
# cycle in fp32 where it is a convolution and where it is a matrix product, and in TF32 at stride 1. At other strides TF32 takes
# the same time for whatever taps and up to 128 output channels: cycles of a multiprocessor for a pixel and an input channel.
START, CONVOLUTION, PRODUCT = 24_000, 64, 120
TF32, TF32_CHANNELS, TF32_PIXEL = 1700, 128, 1.3
# In 16 bits likewise, at any stride; channels that are no multiple of 8 take it so many times as long.
NARROW_PIXEL, RAGGED = 0.85, 3

# PyTorch has one flag for all threads. Who reads it waits for who has it changed; the same thread may do both.
_FLAG = threading.RLock()
_changes = _restorations = 0  # of the flag; whoever has the lock counts
FLAG, PARENTS = ("cuda", "conv"), (("generic", "all"), ("cuda", "all"))  # the flag inherits from the latter, that from the former


def forward(x, weight, bias, geometry: Geometry):
    """The pre-activation [N, C_out, H_out, W_out] of x [N, C_in, H, W]."""
    return F.conv_transpose2d(x, weight, bias, geometry.stride, geometry.padding, geometry.output_padding)


def autocast(device) -> torch.dtype | None:
    """The dtype to which autocast casts a convolution's operands at this moment; None where it is off."""
    if torch._C._is_any_autocast_enabled() and device.type in ("cpu", "cuda") and torch.is_autocast_enabled(device.type):
        return torch.get_autocast_dtype(device.type)
    return None


def pre_activation(problem: Problem, x, weight, bias):
    """``forward`` as a problem says: operands in its dtype, products in the precision that it permits."""
    if not autocast(x.device):  # else it casts them itself, weights once for many calls
        x, weight, bias = cast(problem.dtype, x, weight, bias)
    with in_precision(problem.permitted, x.device):
        return forward(x, weight, bias, problem.geometry)


def computed_in(problem: Problem) -> torch.dtype:
    """In what dtype torch's convolutions are called: on a CPU the fp32 ones are 2 to 50 times as fast as those of 16 bits."""
    return torch.float32 if problem.device.type == "cpu" and problem.dtype.itemsize == 2 else problem.dtype


def cast(dtype, *tensors) -> list:
    """Tensors, or None, in a dtype."""
    return [t if t is None or t.dtype == dtype else t.to(dtype) for t in tensors]


def gradients(g, x, weight, geometry: Geometry, wants_x, wants_weight):
    """From ``g`` at the pre-activation: the gradients of x and of the weight, None for what is not wanted."""
    settings = geometry.stride, geometry.padding, (1, 1), True, geometry.output_padding, 1
    mask = [wants_x, wants_weight, False]
    return torch.ops.aten.convolution_backward(g, x, weight, None, *settings, mask)[:2] if any(mask) else (None, None)


def permits_tf32() -> bool:
    """Whether PyTorch's flags let cuDNN's convolutions use TF32, and cuDNN is what convolves."""
    restorations = _restorations
    value = _get(FLAG)
    if _changes != restorations:  # else none was going on, and none began: the lock takes as long as all else here
        with _FLAG:
            value = _get(FLAG)
    return value == "tf32" and torch._C._get_cudnn_enabled()


@contextmanager
def in_precision(precision, device):
    """Let cuDNN's convolutions compute in ``precision`` meanwhile.

    Where that is not what the flag says, it is changed and restored. Meanwhile our calls in other threads wait, for the time
    that the host takes; torch's own convolutions there see the changed flag, of which PyTorch has but one.
    """
    if device.type != "cuda":
        yield
        return
    global _changes, _restorations
    with _FLAG:
        before = _get(FLAG)
        if (before == "tf32") == (precision == "tf32"):
            yield
            return
        _changes += 1
        try:
            inherited = _inherited(before)
            _set(FLAG, "tf32" if precision == "tf32" else "ieee")
            try:
                yield
            finally:
                _set(FLAG, "none" if inherited else before)
        finally:
            _restorations += 1


def _inherited(value) -> bool:
    """Whether the flag has its value from a more general one: it then changes with that, which is changed back at once."""
    other = "ieee" if value == "tf32" else "tf32"
    for number, parent in enumerate(PARENTS):
        below, own = [_get(flag) for flag in (*PARENTS[number + 1 :], FLAG)], _get(parent)
        _set(parent, other)
        after = [_get(flag) for flag in (*PARENTS[number + 1 :], FLAG)]
        _set(parent, own)
        if after != below:  # what lies between inherits, and the flag, or what lies between alone
            return after[-1] != below[-1]
    return False


def _get(flag):
    return torch._C._get_fp32_precision_getter(*flag)


def _set(flag, value):
    torch._C._set_fp32_precision_setter(*flag, value)


def precision(problem: Problem) -> str:
    """TF32 where it is asked for, or permitted and, as far as is known, used by cuDNN too; elsewhere fp32 costs nothing."""
    axes, channels = (problem.geometry.rows, problem.geometry.cols), (problem.in_channels, problem.out_channels)
    known = all((axis.kernel_size, axis.stride, axis.padding) == TF32_AXIS for axis in axes)
    known = known and all(count % 8 == 0 and count <= 64 for count in channels)
    return cudnn_precision(problem) if problem.by_flags and known else problem.permitted


def cudnn_precision(problem: Problem) -> str:
    """In which precision cuDNN is expected to compute."""
    work = problem.batch * problem.height * problem.width * problem.in_channels
    return "fp32" if work < TF32_WORK[problem.in_channels >= 16] else problem.permitted


def cycles(problem: Problem) -> float:
    """Predicted clock cycles of a GPU for the convolution and one pass in place on its result; in TF32 the least.

    0 where the problem has no convolution, and where no kernel competes, so that it is the same in every backend.
    """
    if problem.geometry is None or gpu.why_no_kernels(problem.device):
        return 0
    geometry, multiprocessors = problem.geometry, gpu.of(problem.device).multiprocessors
    batch, in_channels, out_channels, _, _ = problem.size
    pixels = batch * problem.output_shape[2] * problem.output_shape[3]
    on_tensor_cores = pixels * in_channels * -(-out_channels // TF32_CHANNELS) / multiprocessors
    if problem.dtype.itemsize == 2:
        return START + on_tensor_cores * NARROW_PIXEL * (RAGGED if in_channels % 8 or out_channels % 8 else 1)
    if cudnn_precision(problem) == "tf32" and geometry.parities > 1:
        return START + on_tensor_cores * TF32_PIXEL
    operations = 2 * pixels * out_channels * in_channels * geometry.taps / geometry.parities
    rate = PRODUCT if geometry.taps == geometry.parities == 1 else CONVOLUTION
    return START + operations / ((rate if cudnn_precision(problem) == "fp32" else TF32) * multiprocessors)
