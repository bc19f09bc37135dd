"""What is to be computed: operands, geometry and the parity algebra.

Along one axis, output position ``stride * i + parity`` only meets the kernel taps congruent to
``parity + padding``; tap ``k`` takes it to input position ``i + shift``:

    parity = (k - padding) mod stride        shift = -((k - padding) div stride)

So a strided transposed convolution is one dense correlation a parity, and nothing is multiplied by
an inserted zero. An index ``i``, which yields one output of every parity, is a *cell*.
"""

import numbers
from dataclasses import dataclass
from typing import NamedTuple

import torch

from numba_impl.epilogue import Epilogue

LARGEST = 2**31 - 1  # of a geometry's numbers and of a side of the output: torch's convolutions count in 32 bits, and wrap


@dataclass(frozen=True)
class Axis:
    """One spatial axis of a transposed convolution, in torch's terms."""

    kernel_size: int
    stride: int
    padding: int
    output_padding: int

    def output_size(self, size: int) -> int:
        """Output positions for ``size`` input positions."""
        return (size - 1) * self.stride - 2 * self.padding + self.kernel_size + self.output_padding

    def cells(self, size: int) -> int:
        """Cells that cover the output of ``size`` input positions."""
        return -(-self.output_size(size) // self.stride)

    @property
    def parities(self) -> tuple[int, ...]:
        """The output parity that each tap feeds."""
        return tuple((k - self.padding) % self.stride for k in range(self.kernel_size))

    @property
    def shifts(self) -> tuple[int, ...]:
        """Input position minus cell, for each tap."""
        return tuple(-((k - self.padding) // self.stride) for k in range(self.kernel_size))

    @property
    def first_shift(self) -> int:
        """The smallest shift: the last tap's."""
        return -((self.kernel_size - 1 - self.padding) // self.stride)

    @property
    def reach(self) -> int:
        """Input positions that a cell meets, less one."""
        return -(-self.padding // self.stride) - self.first_shift


@dataclass(frozen=True)
class Geometry:
    """Both axes of a transposed convolution."""

    rows: Axis
    cols: Axis

    @classmethod
    def of(cls, kernel_size, stride=1, padding=0, output_padding=0) -> "Geometry":
        """From ints or pairs, as torch takes them. Raises TypeError and ValueError, naming the argument."""
        kernel = pair("kernel_size", kernel_size, 1)
        stride = pair("stride", stride, 1)
        padding = pair("padding", padding, 0)
        output_padding = pair("output_padding", output_padding, 0)
        if any(extra >= step for extra, step in zip(output_padding, stride)):
            raise ValueError(f"output_padding must be smaller than stride, got {output_padding} with stride {stride}")
        return cls(*(Axis(*axis) for axis in zip(kernel, stride, padding, output_padding)))

    @property
    def taps(self) -> int:
        return self.rows.kernel_size * self.cols.kernel_size

    @property
    def parities(self) -> int:
        return self.rows.stride * self.cols.stride

    @property
    def kernel_size(self) -> tuple[int, int]:
        return self.rows.kernel_size, self.cols.kernel_size

    @property
    def stride(self) -> tuple[int, int]:
        return self.rows.stride, self.cols.stride

    @property
    def padding(self) -> tuple[int, int]:
        return self.rows.padding, self.cols.padding

    @property
    def output_padding(self) -> tuple[int, int]:
        return self.rows.output_padding, self.cols.output_padding


class Operand(NamedTuple):
    """What a backend may know of a tensor before it is at hand; its strides and its address count in each call."""

    shape: torch.Size
    dtype: torch.dtype
    format: str  # as torch's convolutions take it: "nhwc" where its strides are in channels_last's order, else "nchw"


@dataclass(frozen=True)
class Problem:
    """What is to be computed: enough for a backend to say whether it can, how long it takes, and how.

    ``operation``, with the tensors that a plan of it takes and what it gives:

    - "forward" (x, weight, bias): the layer's output;
    - "pre_gradient" (x, weight, bias, gy): from the gradient at the output, of any strides, that at the pre-activation;
    - "activate" (x, y): the epilogue of x alone, into y, which may be x: dense tensors of the same strides, or of any if
      ``torch_only``;
    - "activate_gradient" (x, gy): the gradient at x from gy at the epilogue of x, a new tensor;
    - "channel_sum" (g): a sum for each channel over images and pixels, the gradient of a bias; of 16-bit values in fp32.

    The first two round every operand to ``dtype``, and give a result of that dtype and of ``format``.

    ``arguments`` makes problems of what users pass, and checks it.
    """

    operation: str
    x: Operand  # or g
    device: torch.device
    epilogue: Epilogue | None = None
    weight: Operand | None = None
    bias: Operand | None = None
    gy: Operand | None = None
    geometry: Geometry | None = None
    autocast: torch.dtype | None = None  # to which autocast rounds every operand; None: all have x's
    permitted: str = "fp32"  # or "tf32": the precision that products of fp32 may have
    by_flags: bool = False  # PyTorch's flags, and no argument, decided on it
    torch_only: str = ""  # why every operation must be torch's own

    @property
    def dtype(self) -> torch.dtype:
        return self.autocast or self.x.dtype

    @property
    def convolved(self) -> str:
        """The format in which torch's convolutions give their results, gradients too."""
        return "nhwc" if "nhwc" in (self.x.format, self.weight.format) else "nchw"

    @property
    def format(self) -> str:
        """Of the result: what is both, torch's operations after the convolution lay out as NCHW."""
        batch, channels, height, width = self.output_shape
        return self.convolved if batch and channels > 1 and height * width > 1 else "nchw"

    @property
    def batch(self) -> int:
        return self.x.shape[0]

    @property
    def in_channels(self) -> int:
        return self.weight.shape[0]

    @property
    def out_channels(self) -> int:
        return self.weight.shape[1]

    @property
    def height(self) -> int:
        return self.x.shape[2]

    @property
    def width(self) -> int:
        return self.x.shape[3]

    @property
    def size(self) -> tuple[int, int, int, int, int]:
        """(batch, in_channels, out_channels, height, width)."""
        return self.batch, self.in_channels, self.out_channels, self.height, self.width

    @property
    def output_shape(self) -> tuple[int, int, int, int]:
        """The layer's output, and the pre-activation."""
        rows, cols = self.geometry.rows, self.geometry.cols
        return self.batch, self.out_channels, rows.output_size(self.height), cols.output_size(self.width)


def positive_int(name, value, least=1) -> int:
    """``value``, if it is an int from ``least`` to ``LARGEST``. Raises TypeError and ValueError, naming it."""
    if type(value) is not int and (not isinstance(value, numbers.Integral) or isinstance(value, bool)):
        raise TypeError(f"{name} must be an int, got {value!r}")
    if not least <= value <= LARGEST:
        raise ValueError(f"{name} must be at least {least} and at most {LARGEST}, got {value}")
    return int(value)


def pair(name, value, least) -> tuple[int, int]:
    """An int or a pair of ints from ``least`` to ``LARGEST`` as a pair. Raises TypeError and ValueError, naming it."""
    both = value if isinstance(value, (tuple, list)) else (value, value)
    if len(both) != 2:
        raise ValueError(f"{name} must be an int or a pair of ints, got {value!r}")
    first, second = both
    if type(first) is type(second) is int and least <= first <= LARGEST and least <= second <= LARGEST:
        return first, second
    return positive_int(name, first, least), positive_int(name, second, least)
