"""The layer as functions of tensors, or of arrays with ``__cuda_array_interface__``."""

import torch

from numba_impl import arguments, autograd, convolution, dispatch, exchange
from numba_impl.arguments import autocasts, is_transformed, kind, kinds, needs_grad
from numba_impl.backends.base import DTYPES
from numba_impl.epilogue import MISH_ADD_HARDTANH_SCALE as CHAIN
from numba_impl.epilogue import Epilogue, layer_constants
from numba_impl.exchange import CudaArray
from numba_impl.problem import Geometry, Problem, pair

Pair = int | tuple[int, int]

LAYER = autograd.operator(CHAIN)
BOUNDS = -1.0, 1.0  # hardtanh's, in the layer


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
    ``__cuda_array_interface__``, whose streams are waited for; one floating-point dtype and device, any strides, none is
    modified. ``stride``, ``padding`` and ``output_padding`` are ints or pairs as in
    ``torch.nn.functional.conv_transpose2d``. ``precision``: "fp32", "tf32" (a permission), or None for what PyTorch's flags
    permit; ``backend``: a name of ``backends.BACKENDS`` forces it. Returns a tensor [N, C_out, H_out, W_out] (or without N),
    which shares no memory with them.

    Raises TypeError or ValueError for bad arguments and for a forced backend that cannot serve.
    """
    if not _tensors(x, weight, bias):
        with exchange.as_tensors(x=x, weight=weight, bias=bias) as (x, weight, bias):
            settings = dict(add_value=add_value, scale=scale, precision=precision, backend=backend)
            return conv_transpose2d_mish_add_hardtanh_scale(x, weight, bias, stride, padding, output_padding, **settings)
    if torch.compiler.is_compiling():
        return _traced(x, weight, bias, stride, padding, output_padding, precision, backend, add_value, scale, *BOUNDS)
    constants = layer_constants(add_value, scale)
    return fused(x, weight, bias, stride, padding, output_padding, CHAIN, constants, precision, backend)


def _tensors(x, weight, bias):
    return isinstance(x, torch.Tensor) and isinstance(weight, torch.Tensor) and (bias is None or isinstance(bias, torch.Tensor))


def fused(
    x, weight, bias, stride, padding, output_padding, epilogue: Epilogue, constants, precision=None, backend=None
) -> torch.Tensor:
    """The ``epilogue``, with constants that it has checked, of conv_transpose2d(x, weight, bias), tensors; the rest as above."""
    tensors = kinds(x, weight, bias)
    numbers = pair("stride", stride, 1), pair("padding", padding, 0), pair("output_padding", output_padding, 0)
    modes = arguments.modes(precision, x.device)
    plan = dispatch.remembered(arguments.layer, backend, "forward", epilogue, *tensors, None, *numbers, modes)
    if x.is_neg() or weight.is_neg() or bias is not None and bias.is_neg():  # as the imaginary part of a conjugate is
        x, weight, bias = x.resolve_neg(), weight.resolve_neg(), None if bias is None else bias.resolve_neg()
    x4 = x if x.dim() == 4 else x.unsqueeze(0)
    if plan.differentiable or not needs_grad(x, weight, bias):
        y = plan(x4, weight, bias, constants=constants)
    else:
        y = autograd.operator(epilogue)(x4, weight, bias, *numbers, precision, backend, *constants)
    return y if x.dim() == 4 else y.squeeze(0)


def _traced(x, weight, bias, stride, padding, output_padding, precision, backend, *constants):
    """As torch.compile and torch.export see the layer: one operator, or the eager chain, which they compile themselves.

    The operator checks the arguments: what is looked at here, compiled code looks at again in each call. So the devices
    are asked of x, too, and not looked up in ``arguments.DEVICES``.
    """
    if x.dtype not in DTYPES or not (x.is_cpu or x.is_cuda) or autocasts(x.device):
        arguments.check_tensors(*kinds(x, weight, bias), autocasts(x.device))
        geometry = Geometry.of(tuple(weight.shape[2:]), stride, padding, output_padding)
        return CHAIN.forward(convolution.forward(x, weight, bias, geometry), CHAIN.check(*constants))
    settings = *((n, n) if isinstance(n, int) else n for n in (stride, padding, output_padding)), precision, backend
    if x.dim() == 3:
        return LAYER(x.unsqueeze(0), weight, bias, *settings, *constants).squeeze(0)
    return LAYER(x, weight, bias, *settings, *constants)


def describe(x, weight, bias, stride, padding, output_padding, precision) -> Problem:
    """The checked ``Problem`` of the fused layer's arguments."""
    modes = arguments.modes(precision, x.device)
    return arguments.layer("forward", CHAIN, *kinds(x, weight, bias), None, stride, padding, output_padding, modes)


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
    the result replaces x, which is returned; else a new tensor of x's shape. fp32 without gradients runs in one pass.

    Raises TypeError for an argument of the wrong type, ValueError if min_val > max_val.
    """
    if not isinstance(x, torch.Tensor):
        with exchange.as_tensors(x=x) as (x,):
            return mish_add_hardtanh_scale(x, add_value, scale, min_val, max_val, inplace)
    constants = CHAIN.check(add_value, scale, min_val, max_val)
    plan = dispatch.remembered(arguments.activation, None, CHAIN, kind("x", x), _why_torch_only(x))
    y = plan(x, x if inplace else None, constants=constants)
    if not inplace:
        return y
    if y is not x:
        return x.copy_(y)
    if not x.is_inference():  # those keep no version
        torch.autograd.graph.increment_version(x)
    return x


def _why_torch_only(x) -> str:
    """Why the activation must be made of torch's own operations, or an empty string."""
    if needs_grad(x):
        return arguments.DIFFERENTIATED
    if is_transformed():
        return arguments.TRANSFORMED
    return arguments.NEGATED if x.is_neg() else ""
