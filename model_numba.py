"""``ModelNumba``: ConvTranspose2d -> Mish -> Add -> Hardtanh -> Scale as one layer on Numba kernels."""

from typing import Self

import torch
from torch import nn
from torch.compiler import is_dynamo_compiling
from torch.nn import ConvTranspose2d
from torch.nn.modules.module import _has_any_global_hook

from numba_impl import arguments, convolution, dispatch, functional
from numba_impl.arguments import check_precision
from numba_impl.epilogue import MISH_ADD_HARDTANH_SCALE, Constants
from numba_impl.functional import Pair
from numba_impl.problem import Geometry, positive_int

FUSED = {"groups": 1, "dilation": (1, 1), "padding_mode": "zeros"}  # of a convolution that the fused way serves


class ModelNumba(nn.Module):
    """hardtanh(mish(conv_transpose2d(x)) + add_value, -1, 1) * scale, fused.

    Takes x [N, C_in, H, W] or [C_in, H, W] and gives [N, C_out, H_out, W_out] or without N. The
    parameters live in ``conv_transpose``, an ``nn.ConvTranspose2d``: checkpoints of the plain model
    load, and a seed draws the same values. Where that convolution is more than it seems (it has hooks,
    parametrizations, groups, another class), it is called as a module, and the activation follows in one pass.

    ``kernel_size``, ``stride``, ``padding``, ``output_padding``: ints or pairs, as in torch.
    ``precision``: "fp32", "tf32" (a permission), or None to follow PyTorch's flags at each call.
    ``backend``: a name of ``numba_impl.backends.BACKENDS`` forces it, None lets dispatch choose.

    Raises TypeError or ValueError that names the argument; a forced backend that cannot serve an
    input raises ValueError at the call.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Pair,
        stride: Pair,
        padding: Pair,
        output_padding: Pair,
        add_value: float,
        scale: float,
        *,
        precision: str | None = None,
        backend: str | None = None,
    ) -> None:
        super().__init__()
        positive_int("in_channels", in_channels)
        positive_int("out_channels", out_channels)
        Geometry.of(kernel_size, stride, padding, output_padding)
        conv = nn.ConvTranspose2d(in_channels, out_channels, kernel_size, stride, padding, output_padding)
        self._adopt(conv, add_value, scale, precision, backend)

    @classmethod
    def from_conv(
        cls,
        conv: nn.ConvTranspose2d,
        add_value: float,
        scale: float,
        *,
        precision: str | None = None,
        backend: str | None = None,
    ) -> Self:
        """The layer around a trained ``nn.ConvTranspose2d``, whose parameters it shares.

        Raises TypeError for another module, ValueError for groups, dilation or a padding mode other
        than the default.
        """
        if not isinstance(conv, nn.ConvTranspose2d):
            raise TypeError(f"conv must be an nn.ConvTranspose2d, got {type(conv).__name__}")
        for name, only in FUSED.items():
            if getattr(conv, name) != only:
                raise ValueError(f"conv must have {name}={only!r}, got {getattr(conv, name)!r}")
        Geometry.of(conv.kernel_size, conv.stride, conv.padding, conv.output_padding)
        layer = cls.__new__(cls)
        nn.Module.__init__(layer)
        layer._adopt(conv, add_value, scale, precision, backend)
        return layer

    def _adopt(self, conv, add_value, scale, precision, backend):
        Constants.of(add_value, scale)
        check_precision(precision)
        dispatch.check_backend(backend)
        self.conv_transpose = conv
        self.add_value, self.scale = _plain_number(add_value), _plain_number(scale)
        self.precision, self.backend = precision, backend

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        conv = self._modules["conv_transpose"]  # nn.Module's own look-up takes as long as all else here
        if why_called(conv):
            return self._after(conv, x)
        parameters = conv._parameters
        own = "weight" in parameters and "bias" in parameters  # else they are attributes, as in DataParallel's replicas
        return functional.conv_transpose2d_mish_add_hardtanh_scale(
            x,
            parameters["weight"] if own else conv.weight,
            parameters["bias"] if own else conv.bias,
            conv.stride,
            conv.padding,
            conv.output_padding,
            add_value=self.add_value,
            scale=self.scale,
            precision=self.precision,
            backend=self.backend,
        )

    def _after(self, conv, x):
        """The convolution called as a module, then the activation."""
        if self.backend not in (None, "reference"):
            raise ValueError(f"backend {self.backend!r} cannot serve this call: {why_called(conv)}")
        with convolution.in_precision(arguments.permitted(self.precision, x.is_cuda), x.device):
            z = conv(x)
        return functional.mish_add_hardtanh_scale(z, self.add_value, self.scale)

    def plain(self) -> nn.Module:
        """The layer in plain PyTorch, with the same parameters: for exporters that know torch's operators alone."""
        return Plain(self.conv_transpose, self.add_value, self.scale)

    def explain(self, x: torch.Tensor) -> str:
        """Which backend would serve ``x`` now, and why each other one would not."""
        conv = self.conv_transpose
        if reason := why_called(conv):
            return f"conv_transpose is called as a module, since {reason}; then the activation in one pass"
        problem = functional.describe(x, conv.weight, conv.bias, conv.stride, conv.padding, conv.output_padding, self.precision)
        return dispatch.explain(problem, self.backend)

    def extra_repr(self) -> str:
        names = ("add_value", "scale", "precision", "backend")
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in names)


class Plain(nn.Module):
    """The layer as one writes it in PyTorch."""

    def __init__(self, conv_transpose: nn.Module, add_value: float, scale: float) -> None:
        super().__init__()
        self.conv_transpose = conv_transpose
        self.constants = Constants.of(add_value, scale)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return MISH_ADD_HARDTANH_SCALE.forward(self.conv_transpose(x), self.constants)


def why_called(conv) -> str:
    """Why a convolution must be called as a module, and not read as a weight, a bias and numbers; empty if it need not.

    Compiled code looks again, in each call, at whatever is looked at here; so that is little.
    """
    if type(conv) is not ConvTranspose2d:
        return f"it is a {type(conv).__name__}"
    if conv._forward_hooks or conv._forward_pre_hooks:
        return "it has hooks"
    dilation = conv.dilation  # its numbers are looked at: for a comparison of tuples compiled code looks at ten things more
    if conv.groups != 1 or type(dilation) is not tuple or dilation[0] != 1 or dilation[1] != 1:
        return f"groups is {conv.groups} and dilation {dilation}"
    return "" if is_dynamo_compiling() else _why_called_by_more(conv, conv.__dict__)


def _why_called_by_more(conv, has) -> str:
    """``why_called`` by what compiled code takes for granted."""
    if has["_backward_hooks"] or has["_backward_pre_hooks"]:
        return "it has hooks"
    if _has_any_global_hook():
        return "there are hooks of all modules"
    if "forward" in has:
        return "its forward has been replaced"
    if has["padding_mode"] != "zeros":
        return f"padding_mode is {conv.padding_mode!r}"
    return "" if "weight" in has["_parameters"] or "weight" in has else "it has no weight"


def _plain_number(value):
    """NumPy's numbers as Python's, which a compiler knows."""
    return value if type(value) in (int, float) else float(value)


ModelNew = ModelNumba
