"""The sizes of one call of the layer, and operands of these sizes: what tests, benchmarks and the doctor run it on."""

from dataclasses import dataclass

import torch

from numba_impl.problem import Geometry


@dataclass(frozen=True)
class Case:
    """Sizes of one call: ``x`` is (N, C_in, H, W), the rest is torch's."""

    x: tuple
    out_channels: int
    kernel_size: int | tuple
    stride: int | tuple = 1
    padding: int | tuple = 0
    output_padding: int | tuple = 0
    bias: bool = True

    def __str__(self):
        sizes = "x".join(map(str, self.x))
        numbers = self.kernel_size, self.stride, self.padding, self.output_padding
        geometry = "-".join(f"{name}{value}".replace(" ", "") for name, value in zip("kspo", numbers))
        return f"{sizes}to{self.out_channels}-{geometry}" + ("" if self.bias else "-nobias")

    @property
    def geometry(self) -> Geometry:
        return Geometry.of(self.kernel_size, self.stride, self.padding, self.output_padding)

    @property
    def weight_shape(self) -> tuple:
        return self.x[1], self.out_channels, *self.geometry.kernel_size

    @property
    def output_shape(self) -> tuple:
        (batch, _, height, width), rows, cols = self.x, self.geometry.rows, self.geometry.cols
        return batch, self.out_channels, rows.output_size(height), cols.output_size(width)

    def draw(self, device="cpu", dtype=torch.float32, generator=None):
        """Fresh (x, weight, bias or None), scaled so that pre-activations are of order 1."""
        options = dict(device=device, dtype=dtype, generator=generator)
        x, weight = torch.randn(self.x, **options), torch.randn(self.weight_shape, **options)
        weight *= (self.x[1] * max(1, self.geometry.taps // self.geometry.parities)) ** -0.5
        return x, weight, torch.randn(self.out_channels, **options) if self.bias else None
