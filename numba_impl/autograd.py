"""The layer as a torch custom operator, ``numba_impl::layer``: differentiable, traceable, and opaque to the compiler.

The forward runs on whatever backend dispatch chooses and keeps x and the parameters alone; the backward
computes the pre-activation again. Both are in float32; what else is differentiated goes through the eager chain.
"""

import functools

import torch

from numba_impl import dispatch
from numba_impl import gpu as cuda_support
from numba_impl.backends import cpu as backend_cpu
from numba_impl.backends import reference
from numba_impl.problem import check_tensors, kinds, layer_constants, pair, resolve_precision

TENSORS = "Tensor x, Tensor weight, Tensor? bias"
NUMBERS = "int[] stride, int[] padding, int[] output_padding, float add_value, float scale"
ARGUMENTS = f"{TENSORS}, {NUMBERS}, str? precision, str? backend"


@torch.library.custom_op("numba_impl::layer", mutates_args=(), schema=f"({ARGUMENTS}) -> Tensor")
def layer(x, weight, bias, stride, padding, output_padding, add_value, scale, precision, backend):
    """hardtanh(mish(conv_transpose2d(x, weight, bias)) + add_value, -1, 1) * scale of a 4-D x; contiguous.

    Arguments as of ``functional.conv_transpose2d_mish_add_hardtanh_scale``. Differentiable once by x, weight and bias.
    """
    plan = _plan(x, weight, bias, stride, padding, output_padding, precision, backend)
    return plan(x, weight, bias, layer_constants(add_value, scale)).contiguous()


@layer.register_fake
def _(x, weight, bias, stride, padding, output_padding, *others):
    """Checks what it can: sizes may be symbols here, so that those of the geometry are checked when the operator runs."""
    check_tensors(*kinds(x, weight, bias), autocast=False)
    numbers = pair("stride", stride, 1), pair("padding", padding, 0), pair("output_padding", output_padding, 0)
    sizes = zip(x.shape[2:], weight.shape[2:], *numbers, strict=True)
    return x.new_empty(x.shape[0], weight.shape[1], *((n - 1) * s - 2 * p + k + extra for n, k, s, p, extra in sizes))


BACKWARD = f"(Tensor gy, {ARGUMENTS}, bool[] wanted) -> Tensor[]"


@torch.library.custom_op("numba_impl::layer_backward", mutates_args=(), schema=BACKWARD)
def layer_backward(gy, x, weight, bias, stride, padding, output_padding, add_value, scale, precision, backend, wanted):
    """The gradients ``wanted`` of (x, weight, bias), contiguous; by torch's convolutions, in TF32 where the forward might be."""
    constants, parts = layer_constants(add_value, scale), []
    images = backend_cpu.images_at_a_time(gy.shape[1:]) if x.device.type == "cpu" else max(1, len(x))
    for gy_part, x_part in zip(gy.split(images), x.split(images), strict=True):
        plan = _plan(x_part, weight, bias, stride, padding, output_padding, precision, backend, backward=True)
        with torch.autocast(x.device.type, enabled=False), reference.convolution_precision(plan.problem.precision, x.device):
            g = plan(x_part, weight, bias, constants, gy_part)
            parts.append(_convolution_backward(g, x_part, weight, plan.problem.geometry, wanted))
    joins = _joined, _summed, _summed
    gradients = [join(found) for join, found, wants in zip(joins, zip(*parts, strict=True), wanted, strict=True) if wants]
    return [gradient.contiguous() for gradient in gradients]


def _plan(x, weight, bias, stride, padding, output_padding, precision, backend, backward=False) -> dispatch.Plan:
    """As the operators see it: below autograd's transforms and autocast, whichever are on when they run."""
    numbers = tuple(stride), tuple(padding), tuple(output_padding)
    below = resolve_precision(precision, x.device), precision is None, False, False  # neither transformed nor under autocast
    return dispatch.plan(*kinds(x, weight, bias), *numbers, below, backend, backward)


def _joined(parts):
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _summed(parts):
    return functools.reduce(torch.add, parts)


def _convolution_backward(g, x, weight, geometry, wanted):
    """The gradients of some images from that at the pre-activation, None for those that are not wanted."""
    wants_x, wants_weight, wants_bias = wanted
    gradient_of_bias = None
    if wants_bias and g.is_contiguous() and cuda_support.runs_kernels(g.device)[0]:
        gradient_of_bias = dispatch.attempt("composite", g.device, lambda: _channel_sum(g))
        wants_bias = gradient_of_bias is None
    settings = geometry.stride, geometry.padding, (1, 1), True, geometry.output_padding, 1
    mask = [wants_x, wants_weight, wants_bias]
    if not any(mask):
        return None, None, gradient_of_bias
    of_x, of_weight, of_bias = torch.ops.aten.convolution_backward(g, x, weight, [weight.shape[1]], *settings, mask)
    return of_x, of_weight, of_bias if wants_bias else gradient_of_bias


def _channel_sum(g):
    from numba_impl.backends.composite import channel_sum

    return channel_sum.launch(g)


@layer_backward.register_fake
def _(gy, x, weight, bias, *settings_and_wanted):
    wanted = settings_and_wanted[-1]
    return [t.new_empty(t.shape) for t, wants in zip((x, weight, bias), wanted, strict=True) if wants]


def _setup(ctx, inputs, output):
    x, weight, bias, *numbers, precision, backend = inputs
    if precision is None and not torch.compiler.is_compiling():
        precision = cuda_support.precision(_plan(x, weight, bias, *numbers[:3], None, backend).problem)
    ctx.save_for_backward(x, weight, bias)
    ctx.settings = *numbers, precision, backend


def _backward(ctx, gy):
    wanted = list(ctx.needs_input_grad[:3])
    gradients = iter(layer_backward(gy, *ctx.saved_tensors, *ctx.settings, wanted))
    return *(next(gradients) if wants else None for wants in wanted), *[None] * 7


layer.register_autograd(_backward, setup_context=_setup)
