"""From what users pass, and PyTorch's modes at that moment, to a ``Problem``: every argument is checked here.

A call describes its tensors and the modes in plain tuples, by which ``dispatch`` finds the plan of an earlier call; the
``Problem`` is made, and all is checked, at the first call of its kind alone.
"""

import torch
from torch._prims_common import suggest_memory_format

from numba_impl.convolution import autocast, permits_tf32
from numba_impl.epilogue import Epilogue
from numba_impl.problem import LARGEST, Geometry, Operand, Problem

CAST = (torch.float32, torch.bfloat16, torch.float16)  # what autocast casts

PRECISIONS = ("fp32", "tf32")

# Why every operation must be torch's own.
UNCAST = "autocast leaves float64 as it is"
TRANSFORMED = "it is differentiated in forward mode or transformed by torch.func, which only torch's own operations can be"
NEGATED = "torch negates it when it is read"


def layer(operation, epilogue: Epilogue, x, weight, bias, gy, stride, padding, output_padding, modes) -> Problem:
    """The problem of a layer's "forward" or "pre_gradient" (``gy`` is None in the forward), from ``kind``s and ``modes``.

    ``stride``, ``padding`` and ``output_padding`` are ints or pairs. Raises TypeError and ValueError, naming the argument.
    """
    permitted, by_flags, cast_to, torch_only = modes
    check_tensors(x, weight, bias, cast_to)
    operands = [_operand(kind) for kind in (x, weight, bias, gy)]
    if cast_to and any(operand and operand.dtype not in CAST for operand in operands):
        cast_to, torch_only = None, torch_only or UNCAST
    (_, in_channels, height, width), device, weight_shape = x[0], x[3], weight[0]
    geometry = Geometry.of(tuple(weight_shape[2:]), stride, padding, output_padding)
    if in_channels != weight_shape[0]:
        raise ValueError(f"x must have {weight_shape[0]} channels, as weight has rows, got {in_channels}")
    for name, axis, size in (("height", geometry.rows, height), ("width", geometry.cols, width)):
        if size < 1:
            raise ValueError(f"x must have a {name} of at least 1, got {size}")
        if not 1 <= axis.output_size(size) <= LARGEST:
            limits = f"at least 1 and at most {LARGEST}"
            raise ValueError(f"the output {name} must be {limits}, got {axis.output_size(size)} from {size} with {axis}")
    permitted = "fp32" if (cast_to or operands[0].dtype).itemsize == 2 else permitted  # TF32 is of fp32's products alone
    return Problem(operation, operands[0], device, epilogue, *operands[1:], geometry, cast_to, permitted, by_flags, torch_only)


def activation(operation, epilogue: Epilogue, x, torch_only) -> Problem:
    """The problem of an epilogue alone, "activate" or "activate_gradient", of a ``kind``. Raises TypeError."""
    check_float("x", x)
    return Problem(operation, _operand(x), x[3], epilogue, torch_only=torch_only)


def channel_sum(g) -> Problem:
    """The problem of summing ``g`` [N, C, H, W], a ``kind``, for each channel."""
    return Problem("channel_sum", _operand(g), g[3])


def _operand(kind):
    if kind is None:
        return None
    shape, strides, dtype, *_ = kind
    likeness = torch.empty_strided(shape, strides, dtype=dtype, device="meta")
    return Operand(shape, dtype, "nhwc" if suggest_memory_format(likeness) is torch.channels_last else "nchw")


def kind(name, tensor) -> tuple:
    """(shape, strides, dtype, device, layout) of a tensor, all that a plan may depend on. Raises TypeError for another object."""
    try:
        return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.layout
    except AttributeError:
        raise TypeError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}") from None
    except RuntimeError:  # some that are sparse have no strides
        return tensor.shape, (), tensor.dtype, tensor.device, tensor.layout


def kinds(x, weight, bias) -> tuple:
    """The ``kind``s of a layer's tensors; None for no bias."""
    return kind("x", x), kind("weight", weight), None if bias is None else kind("bias", bias)


def check_float(name, kind):
    """Raises TypeError unless a ``kind`` is dense, real and of floating point."""
    _, _, dtype, _, layout = kind
    if not dtype.is_floating_point:
        raise TypeError(f"{name} must have a real floating-point dtype, got {dtype}")
    if layout != torch.strided:
        raise TypeError(f"{name} must be dense (torch.strided), got layout {layout}")


def check_tensors(x, weight, bias, autocast):
    """Raises TypeError and ValueError for ``kinds`` that do not fit a transposed convolution, whatever its geometry."""
    named = {name: kind for name, kind in (("x", x), ("weight", weight), ("bias", bias)) if kind is not None}
    for name, kind in named.items():
        check_float(name, kind)
    (x_shape, _, x_dtype, x_device, _), (weight_shape, *_) = x, weight
    for name, (_, _, dtype, device, _) in named.items():
        if dtype != x_dtype and not autocast:
            raise TypeError(f"{name} must have x's dtype {x_dtype}, got {dtype}")
        if device != x_device:
            raise ValueError(f"{name} must be on x's device {x_device}, got {device}")
    if len(x_shape) != 4:  # 3-D ones have got their batch
        raise ValueError(f"x must be 4-D [N, C_in, H, W] or 3-D [C_in, H, W], got shape {tuple(x_shape)}")
    if len(weight_shape) != 4:
        raise ValueError(f"weight must be 4-D [C_in, C_out, KH, KW], got shape {tuple(weight_shape)}")
    if 0 in weight_shape:
        raise ValueError(f"weight must have no dimension of size 0, got shape {tuple(weight_shape)}")
    if bias is not None and bias[0] != weight_shape[1:2]:
        raise ValueError(f"bias must have shape ({weight_shape[1]},), got {tuple(bias[0])}")


def modes(precision, x) -> tuple:
    """(precision that is permitted, whether PyTorch's flags decided on it, autocast's dtype, why all must be torch's own) for a
    tensor's device at this moment.

    Raises ValueError for another ``precision`` than None or one of ``PRECISIONS``.
    """
    allowed = permitted(precision, x.is_cuda)
    return allowed, precision is None, autocast(x.device), TRANSFORMED if is_transformed() else ""


def permitted(precision, on_cuda) -> str:
    """``precision``, or what PyTorch's flags permit for convolutions, on CUDA or not, at this moment."""
    check_precision(precision)
    if precision is None:
        return "tf32" if on_cuda and permits_tf32() else "fp32"
    return precision


def check_precision(precision):
    """Raises ValueError unless ``precision`` is None or one of ``PRECISIONS``."""
    if precision is not None and precision not in PRECISIONS:
        raise ValueError(f"precision must be None or one of {PRECISIONS}, got {precision!r}")


def is_transformed() -> bool:
    """Whether forward-mode differentiation or a ``torch.func`` transform must see every operation."""
    return torch.autograd.forward_ad._current_level >= 0 or torch._C._functorch.maybe_current_level() is not None


def needs_grad(*tensors) -> bool:
    """Whether reverse-mode autograd must see an operation on these tensors, of which some may be None."""
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
