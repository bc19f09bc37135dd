"""Torch operators of the layer, one for each epilogue: differentiable, traceable, and opaque to the compiler.

The forward runs on whatever backend dispatch chooses and keeps x and the parameters alone; the backward
computes the pre-activation again. What these operators do not serve is differentiated through the eager chain.
"""

import functools

import torch

from numba_impl import arguments, convolution, dispatch
from numba_impl.arguments import kind, kinds
from numba_impl.epilogue import EPILOGUES, Epilogue
from numba_impl.problem import pair

TENSORS = "Tensor x, Tensor weight, Tensor? bias"
NUMBERS = "int[] stride, int[] padding, int[] output_padding"
CHOICE = "str? precision, str? backend"


@functools.cache
def operator(epilogue: Epilogue):
    """``numba_impl::conv_transpose2d_NAME(x, weight, bias, stride, padding, output_padding, precision, backend, *constants)``.

    It gives the epilogue of conv_transpose2d(x, weight, bias), x [N, C_in, H, W], contiguous; differentiable once by x,
    weight and bias. Arguments as of ``functional.fused``; it checks them when it runs.
    """
    name = f"numba_impl::conv_transpose2d_{epilogue.name}"
    all_arguments = ", ".join([TENSORS, NUMBERS, CHOICE, *(f"float {parameter}" for parameter in epilogue.parameters)])

    def forward(x, weight, bias, stride, padding, output_padding, precision, backend, *constants):
        constants = epilogue.check(*constants)
        plan = _plan("forward", epilogue, x, weight, bias, None, stride, padding, output_padding, precision, backend)
        return plan(x, weight, bias, constants=constants).contiguous()

    def backward(gy, wanted, x, weight, bias, stride, padding, output_padding, precision, backend, *constants):
        settings = stride, padding, output_padding, precision, backend
        return _gradients(epilogue, gy, wanted, x, weight, bias, settings, constants)

    operators = [
        torch.library.custom_op(name, forward, mutates_args=(), schema=f"({all_arguments}) -> Tensor"),
        torch.library.custom_op(
            f"{name}_backward", backward, mutates_args=(), schema=f"(Tensor gy, bool[] wanted, {all_arguments}) -> Tensor[]"
        ),
    ]
    layer, layer_backward = operators

    def setup(ctx, inputs, output):
        x, weight, bias, stride, padding, output_padding, precision, backend, *constants = inputs
        if precision is None and not torch.compiler.is_compiling():
            settings = stride, padding, output_padding, None, backend
            precision = convolution.precision(_plan("forward", epilogue, x, weight, bias, None, *settings).problem)
        ctx.save_for_backward(x, weight, bias)
        ctx.settings = stride, padding, output_padding, precision, backend, *constants

    def differentiate(ctx, gy):
        wanted = list(ctx.needs_input_grad[:3])
        gradients = iter(layer_backward(gy, wanted, *ctx.saved_tensors, *ctx.settings))
        return *(next(gradients) if wants else None for wants in wanted), *[None] * len(ctx.settings)

    layer.register_fake(_fake_output)
    layer_backward.register_fake(_fake_gradients)
    layer.register_autograd(differentiate, setup_context=setup)
    return layer


def _fake_output(x, weight, bias, stride, padding, output_padding, *others):
    """Checks what it can: sizes may be symbols here, so that those of the geometry are checked when the operator runs."""
    arguments.check_tensors(*kinds(x, weight, bias), autocast=False)
    numbers = pair("stride", stride, 1), pair("padding", padding, 0), pair("output_padding", output_padding, 0)
    sizes = zip(x.shape[2:], weight.shape[2:], *numbers, strict=True)
    return x.new_empty(x.shape[0], weight.shape[1], *((n - 1) * s - 2 * p + k + extra for n, k, s, p, extra in sizes))


def _fake_gradients(gy, wanted, x, weight, bias, *others):
    return [t.new_empty(t.shape) for t, wants in zip((x, weight, bias), wanted, strict=True) if wants]


def _gradients(epilogue, gy, wanted, x, weight, bias, settings, constants):
    """The gradients ``wanted`` of (x, weight, bias), contiguous; by torch's convolutions, in TF32 where the forward might be."""
    wants_x, wants_weight, wants_bias = wanted
    images = _plan("pre_gradient", epilogue, x, weight, bias, gy, *settings).images or max(1, len(x))
    parts = []
    for gy_part, x_part in zip(gy.split(images), x.split(images), strict=True):
        plan = _plan("pre_gradient", epilogue, x_part, weight, bias, gy_part, *settings)
        with torch.autocast(x.device.type, enabled=False), convolution.in_precision(plan.problem.permitted, x.device):
            g = plan(x_part, weight, bias, gy_part, constants=constants)
            of_bias = _channel_sum(g) if wants_bias else None
            of_x, of_weight = convolution.gradients(g, x_part, weight, plan.problem.geometry, wants_x, wants_weight)
        parts.append((of_x, of_weight, of_bias))
    joins = _joined, _summed, _summed
    gradients = [join(found) for join, found, wants in zip(joins, zip(*parts, strict=True), wanted, strict=True) if wants]
    return [gradient.contiguous() for gradient in gradients]


def _plan(operation, epilogue, x, weight, bias, gy, stride, padding, output_padding, precision, backend):
    """As an operator sees it: below autograd's transforms and autocast, whichever are on when it runs."""
    below = arguments.permitted(precision, x.device), precision is None, ""
    operands = *kinds(x, weight, bias), gy if gy is None else kind("gy", gy)
    numbers = tuple(stride), tuple(padding), tuple(output_padding)
    return dispatch.remembered(arguments.layer, backend, operation, epilogue, *operands, *numbers, below)


def _channel_sum(g):
    return dispatch.remembered(arguments.channel_sum, None, kind("g", g))(g)


def _joined(parts):
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _summed(parts):
    return functools.reduce(torch.add, parts)


for _epilogue in EPILOGUES:
    operator(_epilogue)  # now, so that a loaded program finds it
