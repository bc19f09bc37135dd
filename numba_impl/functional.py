"""The layer as functions of tensors, or of arrays with ``__cuda_array_interface__``.

A call goes straight to its plan where it is what it seems: plain tensors, and nobody that watches. What watches (a mode, a
tracer, a compiler) sees an operator, or, where that does not serve, the eager chain; a subclass of tensors is asked first.
"""

import torch
from torch.compiler import is_compiling, is_dynamo_compiling
from torch.overrides import handle_torch_function, has_torch_function

from numba_impl import arguments, autograd, convolution, dispatch, exchange
from numba_impl.arguments import is_transformed, kind, kinds, needs_grad
from numba_impl.backends.base import DTYPES
from numba_impl.epilogue import MISH_ADD_HARDTANH_SCALE as CHAIN
from numba_impl.epilogue import Epilogue, layer_constants
from numba_impl.exchange import CudaArray
from numba_impl.problem import Problem, pair

Pair = int | tuple[int, int]

LAYER = torch.ops.numba_impl.conv_transpose2d_mish_add_hardtanh_scale.default
ACTIVATION = torch.ops.numba_impl.mish_add_hardtanh_scale.default
PLAIN = {torch.Tensor, torch.nn.Parameter}  # tensors of no other class


def conv_transpose2d_mish_add_hardtanh_scale(
    x: torch.Tensor | CudaArray,
    weight: torch.Tensor | CudaArray,
    bias: torch.Tensor | CudaArray | None = None,
    stride: Pair = 1,
    padding: Pair = 0,
    output_padding: Pair = 0,
    *,
    add_value: float,
    scale: float,
    precision: str | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """hardtanh(mish(conv_transpose2d(x, weight, bias)) + add_value, -1, 1) * scale, fused.

    x: [N, C_in, H, W] or [C_in, H, W]; weight: [C_in, C_out, KH, KW]; bias: [C_out] or None: tensors, or arrays with
    ``__cuda_array_interface__``, whose streams are waited for; one floating-point dtype (or as autocast mixes them) and
    device, any strides, none is modified. ``stride``, ``padding`` and ``output_padding`` are ints or pairs as in
    ``torch.nn.functional.conv_transpose2d``. ``precision``: "fp32", "tf32" (a permission), or None for what PyTorch's flags
    permit; ``backend``: a name of ``backends.BACKENDS`` forces it. Returns a tensor [N, C_out, H_out, W_out] (or without N),
    which shares no memory with them, in the dtype and memory format of torch's own convolution.

    Raises TypeError or ValueError for bad arguments and for a forced backend that cannot serve.
    """
    if is_dynamo_compiling():
        return _watched_layer(x, weight, bias, stride, padding, output_padding, precision, backend, add_value, scale, -1.0, 1.0)
    if (
        not is_compiling()
        and type(x) in PLAIN
        and type(weight) in PLAIN
        and (bias is None or type(bias) in PLAIN)
        and not _watched()
    ):
        constants = layer_constants(add_value, scale)
        return fused(x, weight, bias, stride, padding, output_padding, CHAIN, constants, precision, backend)
    tensors, numbers = (x, weight, bias), (stride, padding, output_padding)
    named = dict(add_value=add_value, scale=scale, precision=precision, backend=backend)
    if has_torch_function(tensors):
        return handle_torch_function(conv_transpose2d_mish_add_hardtanh_scale, tensors, *tensors, *numbers, **named)
    if not (isinstance(x, torch.Tensor) and isinstance(weight, torch.Tensor) and isinstance(bias, torch.Tensor | None)):
        with exchange.as_tensors(x=x, weight=weight, bias=bias) as tensors:
            return conv_transpose2d_mish_add_hardtanh_scale(*tensors, *numbers, **named)
    return _watched_layer(*tensors, *numbers, precision, backend, add_value, scale, -1.0, 1.0)


def _watched() -> bool:
    """Whether a mode or a tracer is to see torch's operations."""
    return torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack() or torch._C._get_tracing_state()


def fused(
    x, weight, bias, stride, padding, output_padding, epilogue: Epilogue, constants, precision=None, backend=None
) -> torch.Tensor:
    """The ``epilogue``, with constants that it has checked, of conv_transpose2d(x, weight, bias), plain tensors; see above."""
    x4 = x.unsqueeze(0) if x.dim() == 3 else x
    tensors = kinds(x4, weight, bias)
    numbers = pair("stride", stride, 1), pair("padding", padding, 0), pair("output_padding", output_padding, 0)
    modes = arguments.modes(precision, x)
    plan = dispatch.remembered(arguments.layer, backend, "forward", epilogue, *tensors, None, *numbers, modes)
    if x.is_neg() or weight.is_neg() or bias is not None and bias.is_neg():  # as the imaginary part of a conjugate is
        x4, weight, bias = x4.resolve_neg(), weight.resolve_neg(), None if bias is None else bias.resolve_neg()
    if plan.differentiable or not needs_grad(x, weight, bias):
        y = plan(x4, weight, bias, constants=constants)
    else:
        y = autograd.operators(epilogue).layer(x4, weight, bias, *numbers, plan.problem.autocast, precision, backend, *constants)
    return y if x4 is x else y.squeeze(0)


def _watched_layer(x, weight, bias, stride, padding, output_padding, precision, backend, *constants):
    """As modes, tracers and compilers see the layer: one operator, or the eager chain.

    The operator checks the arguments: what is looked at here, compiled code looks at again in each call, down to a name that
    is looked up.
    """
    if not _operator_serves(x):
        z = torch.nn.functional.conv_transpose2d(x, weight, bias, stride, padding, output_padding)
        return CHAIN.forward(z, CHAIN.check(*constants))
    numbers = ((n, n) if isinstance(n, int) else n for n in (stride, padding, output_padding))
    settings = *numbers, _autocast(x.device), precision, backend
    if x.dim() == 3:
        return LAYER(x.unsqueeze(0), weight, bias, *settings, *constants).squeeze(0)
    return LAYER(x, weight, bias, *settings, *constants)


def _operator_serves(x) -> bool:
    """Whether an operator of ours may stand for the eager chain. The devices are asked of x, and not looked up by name."""
    return x.dtype in DTYPES and (x.is_cpu or x.is_cuda) and not _needs_chain()


def _needs_chain() -> bool:
    """Whether an operator of ours cannot stand for the eager chain: transforms, TorchScript and ONNX know torch's operations
    alone."""
    return is_transformed() or torch.onnx.is_in_onnx_export() or torch.jit.is_tracing()


def _autocast(device) -> torch.dtype | None:
    return convolution.autocast(device)


# What torch.compiler.assume_constant_result does, without its import of the compiler. The answer of the time of tracing is right:
# transforms are those of the compiled code itself, and its own guards hold all that is on outside of it.
_needs_chain._dynamo_marked_constant = _autocast._dynamo_marked_constant = True


def describe(x, weight, bias, stride, padding, output_padding, precision) -> Problem:
    """The checked ``Problem`` of the fused layer's arguments."""
    modes, x4 = arguments.modes(precision, x), x.unsqueeze(0) if x.dim() == 3 else x
    return arguments.layer("forward", CHAIN, *kinds(x4, weight, bias), None, stride, padding, output_padding, modes)


def mish_add_hardtanh_scale(
    x: torch.Tensor | CudaArray,
    add_value: float,
    scale: float,
    min_val: float = -1.0,
    max_val: float = 1.0,
    inplace: bool = False,
) -> torch.Tensor:
    """hardtanh(mish(x) + add_value, min_val, max_val) * scale, element by element.

    x: floating-point tensor of any shape, strides and device, or an array with ``__cuda_array_interface__``. With ``inplace``
    the result replaces x, which is returned; else a new tensor of x's shape. fp32, bf16 and fp16 run in one pass, as does
    their gradient, and are rounded once.

    Raises TypeError for an argument of the wrong type, ValueError if min_val > max_val.
    """
    constants = add_value, scale, min_val, max_val
    if not is_compiling() and type(x) in PLAIN and not _watched() and not needs_grad(x):
        return _activate(x, CHAIN.check(*constants), inplace)
    if has_torch_function((x,)):
        return handle_torch_function(mish_add_hardtanh_scale, (x,), x, *constants, inplace)
    if not isinstance(x, torch.Tensor):
        with exchange.as_tensors(x=x) as (x,):
            return mish_add_hardtanh_scale(x, *constants, inplace)
    source = x.clone() if inplace and needs_grad(x) else x  # which the backward reads
    if _operator_serves(x):
        y = ACTIVATION(source, *constants)
    else:
        y = CHAIN.forward(source, CHAIN.check(*constants))
    return x.copy_(y) if inplace else y


def _activate(x, constants, inplace):
    """Of a plain tensor without a gradient."""
    torch_only = arguments.TRANSFORMED if is_transformed() else arguments.NEGATED if x.is_neg() else ""
    plan = dispatch.remembered(arguments.activation, None, "activate", CHAIN, kind("x", x), torch_only)
    y = plan(x, x if inplace else None, constants=constants)
    if not inplace:
        return y
    if y is not x:
        return x.copy_(y)
    if not x.is_inference():  # those keep no version
        torch.autograd.graph.increment_version(x)
    return x
