"""``ModelNumba``: ConvTranspose2d -> Mish -> Add -> Hardtanh -> Scale as one layer on Numba kernels."""

from typing import Self

import torch
from torch import nn

from numba_impl import dispatch, functional
from numba_impl.arguments import check_precision
from numba_impl.epilogue import Constants
from numba_impl.functional import Pair
from numba_impl.problem import Geometry, positive_int


class ModelNumba(nn.Module):
    """hardtanh(mish(conv_transpose2d(x)) + add_value, -1, 1) * scale, fused.

    Takes x [N, C_in, H, W] or [C_in, H, W] and gives [N, C_out, H_out, W_out] or without N. The
    parameters live in ``conv_transpose``, an ``nn.ConvTranspose2d``: checkpoints of the plain model
    load, and a seed draws the same values.

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
        for name, only in (("groups", 1), ("dilation", (1, 1)), ("padding_mode", "zeros")):
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
        self.add_value, self.scale = add_value, scale
        self.precision, self.backend = precision, backend

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        conv = self.conv_transpose
        return functional.conv_transpose2d_mish_add_hardtanh_scale(
            x,
            conv.weight,
            conv.bias,
            conv.stride,
            conv.padding,
            conv.output_padding,
            add_value=self.add_value,
            scale=self.scale,
            precision=self.precision,
            backend=self.backend,
        )

    def explain(self, x: torch.Tensor) -> str:
        """Which backend would serve ``x`` now, and why each earlier one would not."""
        conv = self.conv_transpose
        problem = functional.describe(x, conv.weight, conv.bias, conv.stride, conv.padding, conv.output_padding, self.precision)
        return dispatch.explain(problem, self.backend)

    def extra_repr(self) -> str:
        names = ("add_value", "scale", "precision", "backend")
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in names)


ModelNew = ModelNumba
