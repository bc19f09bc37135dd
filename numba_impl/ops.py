"""The layer as a torch custom operator, ``numba_impl::layer``: differentiable, traceable, and opaque to the compiler.

The forward runs on whatever backend dispatch chooses and keeps x and the parameters alone; the backward
computes the pre-activation again. Both are in float32; what else is differentiated goes through the eager chain.
"""

import functools

import torch

from numba_impl import backend_composite, backend_cpu, cuda_support, dispatch, reference
from numba_impl.problem import Constants, Geometry, Problem, resolve_precision

TENSORS = "Tensor x, Tensor weight, Tensor? bias"
SETTINGS = "int[] stride, int[] padding, int[] output_padding, float add_value, float scale, str? precision"


@torch.library.custom_op("numba_impl::layer", mutates_args=(), schema=f"({TENSORS}, {SETTINGS}, str? backend) -> Tensor")
def layer(x, weight, bias, stride, padding, output_padding, add_value, scale, precision, backend):
    """hardtanh(mish(conv_transpose2d(x, weight, bias)) + add_value, -1, 1) * scale of a 4-D x; contiguous.

    Arguments as of ``functional.conv_transpose2d_mish_add_hardtanh_scale``. Differentiable once by x, weight and bias.
    """
    problem = Problem.of(x, weight, bias, _geometry(weight, stride, padding, output_padding), precision)
    return dispatch.run(x, weight, bias, Constants.of(add_value, scale), problem, backend).contiguous()


@layer.register_fake
def _(x, weight, bias, stride, padding, output_padding, *others):
    sizes = zip(x.shape[2:], weight.shape[2:], stride, padding, output_padding, strict=True)
    return x.new_empty(x.shape[0], weight.shape[1], *((n - 1) * s - 2 * p + k + extra for n, k, s, p, extra in sizes))


BACKWARD = f"(Tensor gy, {TENSORS}, {SETTINGS}, bool[] wanted) -> Tensor[]"


@torch.library.custom_op("numba_impl::layer_backward", mutates_args=(), schema=BACKWARD)
def layer_backward(gy, x, weight, bias, stride, padding, output_padding, add_value, scale, precision, wanted):
    """The gradients ``wanted`` of (x, weight, bias), contiguous; convolutions are torch's, in the forward's precision."""
    geometry, constants = _geometry(weight, stride, padding, output_padding), Constants.of(add_value, scale)
    images = backend_cpu.images_at_a_time(gy.shape[1:]) if x.device.type == "cpu" else max(1, len(x))
    with reference.convolution_precision(resolve_precision(precision, x.device), x.device):
        parts = [
            _part_backward(gy_part, x_part, weight, bias, geometry, constants, wanted)
            for gy_part, x_part in zip(gy.split(images), x.split(images), strict=True)
        ]
    joins = _joined, _summed, _summed
    gradients = [join(found) for join, found, wants in zip(joins, zip(*parts, strict=True), wanted, strict=True) if wants]
    return [gradient.contiguous() for gradient in gradients]


def _geometry(weight, stride, padding, output_padding):
    return Geometry.of(tuple(weight.shape[2:]), tuple(stride), tuple(padding), tuple(output_padding))


def _joined(parts):
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _summed(parts):
    return functools.reduce(torch.add, parts)


def _part_backward(gy, x, weight, bias, geometry, constants, wanted):
    """The gradients of some images, None for those that are not wanted."""
    z = reference.conv_transpose2d(x, weight, bias, geometry)
    gy = gy if gy.stride() == z.stride() else torch.empty_like(z).copy_(gy)
    g = _gradient_backend(x.device).activate_backward(z, gy, constants)
    settings = geometry.stride, geometry.padding, (1, 1), True, geometry.output_padding, 1
    return torch.ops.aten.convolution_backward(g, x, weight, [weight.shape[1]], *settings, list(wanted))


def _gradient_backend(device):
    if device.type == "cpu":
        return backend_cpu
    return backend_composite if cuda_support.runs_kernels(device)[0] else reference


@layer_backward.register_fake
def _(gy, x, weight, bias, *settings_and_wanted):
    wanted = settings_and_wanted[-1]
    return [t.new_empty(t.shape) for t, wants in zip((x, weight, bias), wanted, strict=True) if wants]


def _setup(ctx, inputs, output):
    x, weight, bias, *settings, precision, _ = inputs
    if precision is None and not torch.compiler.is_compiling():
        precision = resolve_precision(None, x.device)
    ctx.save_for_backward(x, weight, bias)
    ctx.settings = *settings, precision


def _backward(ctx, gy):
    wanted = list(ctx.needs_input_grad[:3])
    gradients = iter(layer_backward(gy, *ctx.saved_tensors, *ctx.settings, wanted))
    return *(next(gradients) if wants else None for wants in wanted), *[None] * 7


layer.register_autograd(_backward, setup_context=_setup)
