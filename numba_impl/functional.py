"""The layer as functions of tensors."""

import torch

from numba_impl import autograd as ops
from numba_impl import dispatch
from numba_impl import gpu as cuda_support
from numba_impl.backends import reference
from numba_impl.problem import (
    Constants,
    Geometry,
    Problem,
    autocasts,
    check_float,
    check_tensors,
    is_transformed,
    kind,
    kinds,
    layer_constants,
    modes,
    needs_grad,
    pair,
)


def conv_transpose2d_mish_add_hardtanh_scale(
    x, weight, bias=None, stride=1, padding=0, output_padding=0, *, add_value, scale, precision=None, backend=None
):
    """hardtanh(mish(conv_transpose2d(x, weight, bias)) + add_value, -1, 1) * scale, fused.

    x: [N, C_in, H, W] or [C_in, H, W]; weight: [C_in, C_out, KH, KW]; bias: [C_out] or None; one
    floating-point dtype and device, any strides, none is modified. ``stride``, ``padding`` and
    ``output_padding`` are ints or pairs as in ``torch.nn.functional.conv_transpose2d``.
    ``precision``: "fp32", "tf32" (a permission), or None for what PyTorch's flags permit; ``backend``:
    a name of ``dispatch.BACKENDS`` forces it. Returns [N, C_out, H_out, W_out] (or without N), which shares no memory with them.

    Raises TypeError or ValueError for bad arguments and for a forced backend that cannot serve.
    """
    if torch.compiler.is_compiling():
        return _traced(x, weight, bias, stride, padding, output_padding, add_value, scale, precision, backend)
    constants = layer_constants(add_value, scale)
    tensors = kinds(x, weight, bias)
    numbers = pair("stride", stride, 1), pair("padding", padding, 0), pair("output_padding", output_padding, 0)
    plan = dispatch.plan(*tensors, *numbers, modes(precision, x.device), backend)
    if x.is_neg() or weight.is_neg() or bias is not None and bias.is_neg():  # as the imaginary part of a conjugate is
        x, weight, bias = x.resolve_neg(), weight.resolve_neg(), None if bias is None else bias.resolve_neg()
    x4 = x if x.dim() == 4 else x.unsqueeze(0)
    if needs_grad(x, weight, bias) and plan.backend != "reference":
        y = ops.layer(x4, weight, bias, *numbers, *constants[:2], precision, backend)
    else:
        y = plan(x4, weight, bias, constants)
    return y if x.dim() == 4 else y.squeeze(0)


def _traced(x, weight, bias, stride, padding, output_padding, add_value, scale, precision, backend):
    """As torch.compile and torch.export see the layer: one operator, or the eager chain, which they compile themselves.

    The operator checks the arguments: what is looked at here, compiled code looks at again in each call. So the devices
    are asked of x, too, and not looked up in ``DEVICES``.
    """
    if x.dtype != torch.float32 or not (x.is_cpu or x.is_cuda) or autocasts(x.device):
        return _eager_chain(x, weight, bias, stride, padding, output_padding, Constants.of(add_value, scale))
    numbers = ((n, n) if isinstance(n, int) else n for n in (stride, padding, output_padding))
    settings = *numbers, add_value, scale, precision, backend
    if x.dim() == 3:
        return ops.layer(x.unsqueeze(0), weight, bias, *settings).squeeze(0)
    return ops.layer(x, weight, bias, *settings)


def _eager_chain(x, weight, bias, stride, padding, output_padding, constants):
    check_tensors(*kinds(x, weight, bias), autocasts(x.device))
    geometry = Geometry.of(tuple(weight.shape[2:]), stride, padding, output_padding)
    return reference.mish_add_hardtanh_scale(reference.conv_transpose2d(x, weight, bias, geometry), constants)


def describe(x, weight, bias, stride, padding, output_padding, precision) -> Problem:
    """The checked ``Problem`` of the fused layer's arguments."""
    return Problem.of(*kinds(x, weight, bias), stride, padding, output_padding, modes(precision, x.device))


def mish_add_hardtanh_scale(x, add_value, scale, min_val=-1.0, max_val=1.0, inplace=False):
    """hardtanh(mish(x) + add_value, min_val, max_val) * scale, element by element.

    x: floating-point tensor of any shape, strides and device. With ``inplace`` the result replaces
    x, which is returned; else a new tensor of x's shape. fp32 without gradients runs in one pass.

    Raises TypeError for an argument of the wrong type, ValueError if min_val > max_val.
    """
    check_float("x", kind("x", x))
    constants = Constants.of(add_value, scale, min_val, max_val)
    name = _one_pass_backend(x)
    in_place, y = False, None
    if name:
        dense = _dense(x)
        in_place = inplace and dense
        source = x if dense else x.contiguous()
        target = x if in_place else torch.empty_like(source)
        y = dispatch.attempt(name, x.device, lambda: dispatch.BACKENDS[name].activate(source, target, constants))
    if y is None:
        y = reference.mish_add_hardtanh_scale(x, constants)
    elif in_place:
        if not x.is_inference():  # those keep no version
            torch.autograd.graph.increment_version(x)
        return x
    return x.copy_(y) if inplace else y


def _one_pass_backend(x):
    """Name of the backend whose ``activate`` serves x, or None."""
    if x.dtype != torch.float32 or needs_grad(x) or is_transformed() or x.is_neg():
        return None
    if x.device.type == "cpu":
        return "cpu"
    return "composite" if cuda_support.runs_kernels(x.device)[0] else None


def _dense(x):
    """Whether x's elements fill one block of memory, in whatever order: no gap, none twice."""
    filled = 1
    for stride, size in sorted((stride, size) for stride, size in zip(x.stride(), x.shape) if size != 1):
        if stride != filled:
            return False
        filled *= size
    return True
