"""From what users pass, and PyTorch's modes at that moment, to a ``Problem``: every argument is checked here.

A call describes its tensors and the modes in plain tuples, by which ``dispatch`` finds the plan of an earlier call; the
``Problem`` is made, and all is checked, at the first call of its kind alone.
"""

import torch

from numba_impl.convolution import permits_tf32
from numba_impl.epilogue import Epilogue
from numba_impl.problem import LARGEST, Geometry, Operand, Problem

PRECISIONS = ("fp32", "tf32")
DEVICES = ("cpu", "cuda")  # the types that backends other than the reference serve

# Why every operation must be torch's own.
AUTOCAST = "autocast is on"
TRANSFORMED = "it is differentiated in forward mode or transformed by torch.func, which only torch's own operations can be"
NEGATED = "torch negates it when it is read"


def layer(operation, epilogue: Epilogue, x, weight, bias, gy, stride, padding, output_padding, modes) -> Problem:
    """The problem of a layer's "forward" or "pre_gradient" (``gy`` is None in the forward), from ``kind``s and ``modes``.

    ``x`` is 4-D or 3-D; ``stride``, ``padding`` and ``output_padding`` are ints or pairs. Raises TypeError and ValueError,
    naming the argument.
    """
    permitted, by_flags, torch_only = modes
    check_tensors(x, weight, bias, torch_only == AUTOCAST)
    (x_shape, dtype, device, _, x_format), (weight_shape, *_) = x, weight
    geometry = Geometry.of(tuple(weight_shape[2:]), stride, padding, output_padding)
    batch, in_channels, height, width = (1, *x_shape)[-4:]
    if in_channels != weight_shape[0]:
        raise ValueError(f"x must have {weight_shape[0]} channels, as weight has rows, got {in_channels}")
    for name, axis, size in (("height", geometry.rows, height), ("width", geometry.cols, width)):
        if size < 1:
            raise ValueError(f"x must have a {name} of at least 1, got {size}")
        if not 1 <= axis.output_size(size) <= LARGEST:
            limits = f"at least 1 and at most {LARGEST}"
            raise ValueError(f"the output {name} must be {limits}, got {axis.output_size(size)} from {size} with {axis}")
    operands = Operand((batch, in_channels, height, width), dtype, x_format), *map(_operand, (weight, bias, gy))
    return Problem(operation, operands[0], device, epilogue, *operands[1:], geometry, permitted, by_flags, torch_only)


def activation(operation, epilogue: Epilogue, x, torch_only) -> Problem:
    """The problem of an epilogue alone, "activate" or "activate_gradient", of a ``kind``. Raises TypeError."""
    check_float("x", x)
    return Problem(operation, _operand(x), x[2], epilogue, torch_only=torch_only)


def channel_sum(g) -> Problem:
    """The problem of summing ``g`` [N, C, H, W], a ``kind``, for each channel."""
    return Problem("channel_sum", _operand(g), g[2])


def _operand(kind):
    return kind and Operand(kind[0], kind[1], kind[4])


def kind(name, tensor) -> tuple:
    """(shape, dtype, device, layout, format) of a tensor, all that a plan may depend on. Raises TypeError for another object."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")
    layout = tensor.layout
    memory_format = "nchw" if layout is torch.strided and tensor.is_contiguous() else _other_format(tensor)
    return tensor.shape, tensor.dtype, tensor.device, layout, memory_format


def kinds(x, weight, bias) -> tuple:
    """The ``kind``s of a layer's tensors; None for no bias."""
    return kind("x", x), kind("weight", weight), None if bias is None else kind("bias", bias)


def _other_format(tensor) -> str:
    nhwc = tensor.layout is torch.strided and tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)
    return "nhwc" if nhwc else "strided"


def check_float(name, kind):
    """Raises TypeError unless a ``kind`` is dense, real and of floating point."""
    _, dtype, _, layout, _ = kind
    if not dtype.is_floating_point:
        raise TypeError(f"{name} must have a real floating-point dtype, got {dtype}")
    if layout != torch.strided:
        raise TypeError(f"{name} must be dense (torch.strided), got layout {layout}")


def check_tensors(x, weight, bias, autocast):
    """Raises TypeError and ValueError for ``kinds`` that do not fit a transposed convolution, whatever its geometry."""
    named = {name: kind for name, kind in (("x", x), ("weight", weight), ("bias", bias)) if kind is not None}
    for name, kind in named.items():
        check_float(name, kind)
    (x_shape, x_dtype, x_device, *_), (weight_shape, *_) = x, weight
    for name, (_, dtype, device, *_) in named.items():
        if dtype != x_dtype and not autocast:
            raise TypeError(f"{name} must have x's dtype {x_dtype}, got {dtype}")
        if device != x_device:
            raise ValueError(f"{name} must be on x's device {x_device}, got {device}")
    if len(x_shape) not in (3, 4):
        raise ValueError(f"x must be 4-D [N, C_in, H, W] or 3-D [C_in, H, W], got shape {tuple(x_shape)}")
    if len(weight_shape) != 4:
        raise ValueError(f"weight must be 4-D [C_in, C_out, KH, KW], got shape {tuple(weight_shape)}")
    if 0 in weight_shape:
        raise ValueError(f"weight must have no dimension of size 0, got shape {tuple(weight_shape)}")
    if bias is not None and bias[0] != weight_shape[1:2]:
        raise ValueError(f"bias must have shape ({weight_shape[1]},), got {tuple(bias[0])}")


def modes(precision, device) -> tuple:
    """(precision that is permitted, whether PyTorch's flags decided on it, why all must be torch's own) at this moment.

    Raises ValueError for another ``precision`` than None or one of ``PRECISIONS``.
    """
    torch_only = AUTOCAST if autocasts(device) else TRANSFORMED if is_transformed() else ""
    return permitted(precision, device), precision is None, torch_only


def permitted(precision, device) -> str:
    """``precision``, or what PyTorch's flags permit for convolutions on ``device`` at this moment."""
    check_precision(precision)
    if precision is None:
        return "tf32" if device.type == "cuda" and permits_tf32() else "fp32"
    return precision


def check_precision(precision):
    """Raises ValueError unless ``precision`` is None or one of ``PRECISIONS``."""
    if precision is not None and precision not in PRECISIONS:
        raise ValueError(f"precision must be None or one of {PRECISIONS}, got {precision!r}")


def autocasts(device) -> bool:
    """Whether autocast is on for a device that a backend of ours serves."""
    return torch._C._is_any_autocast_enabled() and device.type in DEVICES and torch.is_autocast_enabled(device.type)


def is_transformed() -> bool:
    """Whether forward-mode differentiation or a ``torch.func`` transform must see every operation."""
    return torch.autograd.forward_ad._current_level >= 0 or torch._C._functorch.maybe_current_level() is not None


def needs_grad(*tensors) -> bool:
    """Whether reverse-mode autograd must see an operation on these tensors, of which some may be None."""
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
