"""The layer in plain PyTorch: the truth in any dtype, and the backend for what no other serves."""

from contextlib import contextmanager

import torch
import torch.nn.functional as F

from numba_impl.problem import Constants, Geometry, Problem


def supports(problem: Problem):
    return True, ""


def run(x, weight, bias, constants: Constants, problem: Problem, gy=None):
    with convolution_precision(problem.precision, x.device):
        z = conv_transpose2d(x, weight, bias, problem.geometry)
    return mish_add_hardtanh_scale(z, constants) if gy is None else activate_backward(z, gy, constants)


def conv_transpose2d(x, weight, bias, geometry: Geometry):
    """The pre-activation, [N, C_out, H_out, W_out]."""
    return F.conv_transpose2d(x, weight, bias, geometry.stride, geometry.padding, geometry.output_padding)


def mish_add_hardtanh_scale(z, constants: Constants):
    """The eager chain after the convolution."""
    return F.hardtanh(F.mish(z) + constants.add_value, constants.min_val, constants.max_val) * constants.scale


def activate_backward(z, gy, constants: Constants):
    """The gradient of ``mish_add_hardtanh_scale`` at ``z`` from ``gy`` at its result."""
    inside = torch.ops.aten.hardtanh_backward(
        gy * constants.scale, F.mish(z) + constants.add_value, constants.min_val, constants.max_val
    )
    return torch.ops.aten.mish_backward(inside, z)


def laid_out_as(t, like):
    """``t`` with the strides of ``like``, copied if it must be."""
    return t if t.stride() == like.stride() else torch.empty_like(like).copy_(t)


@contextmanager
def convolution_precision(precision, device):
    """Let cuDNN's convolutions compute in ``precision`` meanwhile; touches the flag only if it must change."""
    conv = torch.backends.cudnn.conv
    before = conv.fp32_precision if device.type == "cuda" else None
    if before is None or (before == "tf32") == (precision == "tf32"):
        yield
        return
    conv.fp32_precision = "tf32" if precision == "tf32" else "ieee"
    try:
        yield
    finally:
        conv.fp32_precision = before
