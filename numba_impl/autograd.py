"""The layer and its activation as torch operators: differentiable, traceable, and opaque to the compiler.

An operator runs on whatever backend dispatch chooses. Besides its gradient it has all that torch asks of one: what it gives for
tensors without data, a batching rule, a count of operations, and what it is made of in torch's own operators.
"""

import functools
import math
from typing import NamedTuple

import torch
from torch._prims_common import suggest_memory_format
from torch.utils.flop_counter import register_flop_formula

from numba_impl import arguments, convolution, dispatch
from numba_impl.arguments import kind, kinds
from numba_impl.backends.base import FORMATS
from numba_impl.epilogue import EPILOGUES, Epilogue
from numba_impl.problem import Geometry, pair

TENSORS = "Tensor x, Tensor weight, Tensor? bias"
NUMBERS = "int[] stride, int[] padding, int[] output_padding"
CHOICE = "ScalarType? autocast, str? precision, str? backend"


class Operators(NamedTuple):
    """Of an epilogue; their arguments are those of ``functional``'s functions, which they check when they run.

    - ``layer(x, weight, bias, stride, padding, output_padding, autocast, precision, backend, *constants)``: the epilogue of
      conv_transpose2d(x, weight, bias), x [N, C_in, H, W], all rounded to the dtype ``autocast`` if there is one; as it would
      come out of torch's convolution; differentiable once. It keeps x and the parameters alone for its gradient, which
      computes the pre-activation again.
    - ``activation(x, *constants)``: the epilogue of x, of any shape; differentiable once.
    """

    layer: torch.library.CustomOpDef
    layer_backward: torch.library.CustomOpDef
    activation: torch.library.CustomOpDef
    activation_backward: torch.library.CustomOpDef


@functools.cache
def operators(epilogue: Epilogue) -> Operators:
    """``numba_impl::conv_transpose2d_NAME`` and ``numba_impl::NAME``, and those of their gradients, ``..._backward``."""

    def layer(x, weight, bias, stride, padding, output_padding, autocast, precision, backend, *constants):
        settings = stride, padding, output_padding, autocast, precision, backend
        plan = _layer_plan("forward", epilogue, x, weight, bias, None, *settings)
        y = plan(x, weight, bias, constants=epilogue.check(*constants))
        return y.contiguous(memory_format=FORMATS[plan.problem.format])

    def layer_backward(gy, wanted, x, weight, bias, stride, padding, output_padding, autocast, precision, backend, *constants):
        settings = stride, padding, output_padding, autocast, precision, backend
        return _layer_gradients(epilogue, gy, wanted, x, weight, bias, settings, constants)

    def layer_settings(x, weight, bias, stride, padding, output_padding, autocast, precision, backend, *constants):
        """What PyTorch's flags permit in the forward holds for the backward."""
        if precision is None and not torch.compiler.is_compiling():
            settings = stride, padding, output_padding, autocast, None, backend
            precision = convolution.precision(_layer_plan("forward", epilogue, x, weight, bias, None, *settings).problem)
        return stride, padding, output_padding, autocast, precision, backend, *constants

    def activation(x, *constants):
        plan = dispatch.remembered(arguments.activation, None, "activate", epilogue, kind("x", x), "")
        return plan(x, None, constants=epilogue.check(*constants))

    def activation_backward(gy, wanted, x, *constants):
        plan = dispatch.remembered(arguments.activation, None, "activate_gradient", epilogue, kind("x", x), "")
        return plan(x, gy, constants=constants)

    constants = [f"float {parameter}" for parameter in epilogue.parameters]
    layer_schema, layer_name = [TENSORS, NUMBERS, CHOICE, *constants], f"conv_transpose2d_{epilogue.name}"
    return Operators(
        *_define(layer_name, layer_schema, layer, layer_backward, 3, *_fakes_of_layer, layer_settings, _layer_flop),
        *_define(epilogue.name, ["Tensor x", *constants], activation, activation_backward, 1, *_fakes, lambda x, *c: c),
    )


def _define(name, schema, run, gradients, tensors, fake, fake_gradients, settings, flop=None):
    """An operator, and that of its gradients by its first ``tensors`` arguments, which it keeps.

    ``gradients(gy, wanted, *arguments)`` gives them, and what is not wanted with no value. The fakes give the same with no
    data. ``settings(*arguments)`` gives the arguments after the tensors, as they are kept for the backward. ``flop`` counts
    the forward's floating-point operations, which each gradient by x and weight takes too, from the shapes of the arguments.
    """
    given = ", ".join(schema)
    forward = torch.library.custom_op(f"numba_impl::{name}", _on_plain(run), mutates_args=(), schema=f"({given}) -> Tensor")
    # No list: torch's fallback for batches takes none.
    returned = "Tensor" if tensors == 1 else f"({', '.join(['Tensor'] * tensors)})"
    full_name, full = f"numba_impl::{name}_backward", f"(Tensor gy, bool[] wanted, {given}) -> {returned}"
    backward = torch.library.custom_op(full_name, _on_plain(gradients), mutates_args=(), schema=full)

    def setup(ctx, inputs, output):
        ctx.save_for_backward(*inputs[:tensors])
        ctx.settings = settings(*inputs)

    def differentiate(ctx, gy):
        wanted = list(ctx.needs_input_grad[:tensors])
        found = backward(gy, wanted, *ctx.saved_tensors, *ctx.settings)
        found = found if tensors > 1 else [found]
        return *(g if wants else None for g, wants in zip(found, wanted, strict=True)), *[None] * len(ctx.settings)

    forward.register_autograd(differentiate, setup_context=setup)
    forward.register_fake(fake)
    backward.register_fake(fake_gradients)
    for operator in (forward, backward):
        operator.register_vmap(functools.partial(_one_by_one, operator))
    if flop:
        packets = getattr(torch.ops.numba_impl, name), getattr(torch.ops.numba_impl, f"{name}_backward")
        register_flop_formula(packets[0])(lambda *shapes, out_shape=None: flop(*shapes))
        register_flop_formula(packets[1])(lambda gy, wanted, *shapes, out_shape=None: sum(wanted[:2]) * flop(*shapes))
    return forward, backward


def _on_plain(function):
    """The function of the same memory as plain tensors, with autocast off, which the arguments name if it is on.

    A subclass that does not dispatch is a plain tensor but for its class.
    """

    @functools.wraps(function)
    def on_plain(*given):
        with torch._C._DisableAutocast():
            return function(*(a.as_subclass(torch.Tensor) if isinstance(a, torch.Tensor) else a for a in given))

    return on_plain


def _one_by_one(operator, info, in_dims, *arguments):
    """The batching rule: a call for each element of the batch."""

    def call(number):
        return operator(*(a.select(dim, number) if isinstance(dim, int) else a for a, dim in zip(arguments, in_dims)))

    results = [call(number) for number in range(info.batch_size)]
    if isinstance(results[0], torch.Tensor):
        return torch.stack(results), 0
    return tuple(torch.stack(found) for found in zip(*results)), (0,) * len(results[0])


def _layer_flop(x, weight, *others) -> int:
    """Products and sums of the convolution, as PyTorch counts them."""
    return 2 * x[0] * math.prod(x[2:]) * math.prod(weight)


def _fake_layer(x, weight, bias, stride, padding, output_padding, autocast, *others):
    """Checks what it can: sizes may be symbols here, so that those of the geometry are checked when the operator runs."""
    arguments.check_tensors(*kinds(x, weight, bias), autocast)
    numbers = pair("stride", stride, 1), pair("padding", padding, 0), pair("output_padding", output_padding, 0)
    sizes = zip(x.shape[2:], weight.shape[2:], *numbers, strict=True)
    shape = x.shape[0], weight.shape[1], *((n - 1) * s - 2 * p + k + extra for n, k, s, p, extra in sizes)
    z = torch.empty(shape, dtype=autocast or x.dtype, device=x.device, memory_format=_convolved(x, weight))
    return z.neg()  # has the strides that any of torch's operations after the convolution gives


def _fake_layer_gradients(gy, wanted, x, weight, bias, *others):
    formats = _convolved(x, weight), _convolved(x, weight), torch.contiguous_format
    found = zip((x, weight, bias), formats, wanted, strict=True)
    return tuple(torch.empty_like(t, memory_format=of) if wants else x.new_empty(0) for t, of, wants in found)


def _convolved(x, weight) -> torch.memory_format:
    """``Problem.convolved`` of tensors without data."""
    like = suggest_memory_format(x), suggest_memory_format(weight)
    return torch.channels_last if torch.channels_last in like else torch.contiguous_format


def _fake_activation(x, *constants):
    return torch.empty_like(x)


def _fake_activation_gradient(gy, wanted, x, *constants):
    return torch.empty_like(x)


_fakes_of_layer, _fakes = (_fake_layer, _fake_layer_gradients), (_fake_activation, _fake_activation_gradient)


def _layer_gradients(epilogue, gy, wanted, x, weight, bias, settings, constants):
    """The gradients ``wanted`` of (x, weight, bias), as they come out of torch's convolutions, which compute them, in TF32 where
    the forward might be."""
    wants_x, wants_weight, wants_bias = wanted
    images = _layer_plan("pre_gradient", epilogue, x, weight, bias, gy, *settings).images or max(1, len(x))
    parts = []
    for gy_part, x_part in zip(gy.split(images), x.split(images), strict=True):
        plan = _layer_plan("pre_gradient", epilogue, x_part, weight, bias, gy_part, *settings)
        problem = plan.problem
        with convolution.in_precision(problem.permitted, x.device):
            g = plan(x_part, weight, bias, gy_part, constants=constants)
            of_bias = _channel_sum(g) if wants_bias else None
            operands = convolution.cast(convolution.computed_in(problem), g, *convolution.cast(problem.dtype, x_part, weight))
            of_x, of_weight = convolution.gradients(*operands, problem.geometry, wants_x, wants_weight)
        parts.append((of_x, of_weight, of_bias))
    joins = _joined, _summed, _summed
    of_each = zip(joins, zip(*parts, strict=True), (x, weight, bias), wanted, strict=True)
    found = [join(of).to(t.dtype) if wants else x.new_empty(0) for join, of, t, wants in of_each]
    return tuple(g.contiguous(memory_format=FORMATS[problem.convolved]) if g.dim() == 4 else g for g in found)


def _layer_plan(operation, epilogue, x, weight, bias, gy, stride, padding, output_padding, autocast, precision, backend):
    """As an operator sees it: below autograd's transforms, whichever are on when it runs."""
    below = arguments.permitted(precision, x.is_cuda), precision is None, autocast, ""
    operands = *kinds(x, weight, bias), gy if gy is None else kind("gy", gy)
    numbers = tuple(stride), tuple(padding), tuple(output_padding)
    return dispatch.remembered(arguments.layer, backend, operation, epilogue, *operands, *numbers, below)


def _channel_sum(g):
    return dispatch.remembered(arguments.channel_sum, None, kind("g", g))(g)


def _joined(parts):
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _summed(parts):
    return functools.reduce(torch.add, parts)


def decompositions() -> dict:
    """The operators in torch's own: for ``ExportedProgram.run_decompositions``, beside torch's default table."""

    def layer_of(epilogue):
        def layer(x, weight, bias, stride, padding, output_padding, autocast, precision, backend, *constants):
            geometry = Geometry.of(tuple(weight.shape[2:]), tuple(stride), tuple(padding), tuple(output_padding))
            operands = convolution.cast(autocast or x.dtype, x, weight, bias)
            return epilogue.forward(convolution.forward(*operands, geometry), constants)

        return layer

    table = dict(torch.export.default_decompositions())
    for epilogue in EPILOGUES:
        table[getattr(torch.ops.numba_impl, f"conv_transpose2d_{epilogue.name}").default] = layer_of(epilogue)
        table[getattr(torch.ops.numba_impl, epilogue.name).default] = lambda x, *constants, e=epilogue: e.forward(x, constants)
    return table


for _epilogue in EPILOGUES:
    operators(_epilogue)  # now, so that a loaded program finds them
