"""What is to be computed: geometry, parity algebra, and the checks on every argument.

Along one axis, output position ``stride * i + parity`` only meets the kernel taps congruent to
``parity + padding``; tap ``k`` takes it to input position ``i + shift``:

    parity = (k - padding) mod stride        shift = -((k - padding) div stride)

So a strided transposed convolution is one dense correlation a parity, and nothing is multiplied by
an inserted zero. An index ``i``, which yields one output of every parity, is a *cell*.
"""

import functools
import numbers
from dataclasses import dataclass
from typing import NamedTuple

import torch

PRECISIONS = ("fp32", "tf32")
LARGEST = 2**31 - 1  # of a geometry's numbers and of a side of the output: torch's convolutions count in 32 bits, and wrap
DEVICES = ("cpu", "cuda")  # the types that backends other than the reference serve


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
        """The smallest shift."""
        return min(self.shifts)

    @property
    def reach(self) -> int:
        """Input positions that a cell meets, less one."""
        return max(self.shifts) - self.first_shift


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


class Constants(NamedTuple):
    """The constants of y = hardtanh(mish(z) + add_value, min_val, max_val) * scale."""

    add_value: float
    scale: float
    min_val: float = -1.0
    max_val: float = 1.0

    @classmethod
    def of(cls, add_value, scale, min_val=-1.0, max_val=1.0) -> "Constants":
        """Checked. Raises TypeError for what is no real number, ValueError for an empty interval."""
        values = {"add_value": add_value, "scale": scale, "min_val": min_val, "max_val": max_val}
        for name, value in values.items():
            if not isinstance(value, numbers.Real) or isinstance(value, bool):
                raise TypeError(f"{name} must be a real number, got {value!r}")
        if not min_val <= max_val:
            raise ValueError(f"min_val must not exceed max_val, got min_val={min_val} and max_val={max_val}")
        try:
            return cls(*map(float, values.values()))
        except OverflowError:
            raise ValueError(f"add_value, scale, min_val and max_val must fit a float, got {tuple(values.values())}") from None


def layer_constants(add_value, scale) -> Constants:
    """``Constants.of(add_value, scale)``, remembered; but for zeros, as 0.0 and -0.0 are one key."""
    plain = type(add_value) in (float, int) and type(scale) in (float, int)
    return _remembered_constants(add_value, scale) if plain and add_value and scale else Constants.of(add_value, scale)


_remembered_constants = functools.lru_cache(maxsize=256, typed=True)(Constants.of)


class Kind(NamedTuple):
    """All of a tensor that decides how it is served; its strides and its address count where it is used."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    layout: torch.layout


class Modes(NamedTuple):
    """All of PyTorch's state, and of the permissions, that decides how a call is served."""

    precision: str
    by_flags: bool  # precision was left to PyTorch's flags
    transformed: bool  # in forward mode, or under torch.func: every operation must be torch's
    autocast: bool


@dataclass(frozen=True)
class Problem:
    """One call, as the backends see it: enough to say whether they serve it, and how fast."""

    geometry: Geometry
    batch: int
    in_channels: int
    out_channels: int
    height: int
    width: int
    dtype: torch.dtype
    device: torch.device
    precision: str
    by_flags: bool  # precision was left to PyTorch's flags
    transformed: bool  # in forward mode, or under torch.func: every operation must be torch's
    autocast: bool

    @classmethod
    def of(cls, x, weight, bias, stride, padding, output_padding, modes) -> "Problem":
        """From what ``kinds`` and ``modes`` give; ``x`` is 4-D or 3-D. Raises TypeError and ValueError, naming the argument."""
        modes = Modes(*modes)
        check_tensors(x, weight, bias, modes.autocast)
        x, weight = Kind(*x), Kind(*weight)
        geometry = Geometry.of(tuple(weight.shape[2:]), stride, padding, output_padding)
        batch, in_channels, height, width = (1, *x.shape)[-4:]
        if in_channels != weight.shape[0]:
            raise ValueError(f"x must have {weight.shape[0]} channels, as weight has rows, got {in_channels}")
        for name, axis, size in (("height", geometry.rows, height), ("width", geometry.cols, width)):
            if size < 1:
                raise ValueError(f"x must have a {name} of at least 1, got {size}")
            if not 1 <= axis.output_size(size) <= LARGEST:
                limits = f"at least 1 and at most {LARGEST}"
                raise ValueError(f"the output {name} must be {limits}, got {axis.output_size(size)} from {size} with {axis}")
        return cls(geometry, batch, in_channels, weight.shape[1], height, width, x.dtype, x.device, **modes._asdict())

    def plain_fp32(self) -> tuple[bool, str]:
        """Whether this is fp32 without autocast or transforms, as the fused kernels compute it, and if not, why."""
        if self.dtype != torch.float32:
            return False, f"x is {self.dtype}, not torch.float32"
        if self.transformed:
            return (
                False,
                "it is differentiated in forward mode or transformed by torch.func, which only torch's own operations can be",
            )
        if self.autocast:
            return False, "autocast is on"
        return True, ""

    @property
    def size(self) -> tuple[int, int, int, int, int]:
        """(batch, in_channels, out_channels, height, width)."""
        return self.batch, self.in_channels, self.out_channels, self.height, self.width

    @property
    def output_shape(self) -> tuple[int, int, int, int]:
        rows, cols = self.geometry.rows, self.geometry.cols
        return self.batch, self.out_channels, rows.output_size(self.height), cols.output_size(self.width)


def is_transformed() -> bool:
    """Whether forward-mode differentiation or a ``torch.func`` transform must see every operation."""
    return torch.autograd.forward_ad._current_level >= 0 or torch._C._functorch.maybe_current_level() is not None


def needs_grad(*tensors) -> bool:
    """Whether reverse-mode autograd must see an operation on these tensors, of which some may be None."""
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def autocasts(device) -> bool:
    """Whether autocast is on for a device that a backend of ours serves."""
    on = torch.is_autocast_enabled
    return (on("cpu") or on("cuda")) and device.type in DEVICES and on(device.type)  # a device's type is a new string each time


def check_precision(precision):
    """Raises ValueError unless ``precision`` is None or one of ``PRECISIONS``."""
    if precision is not None and precision not in PRECISIONS:
        raise ValueError(f"precision must be None or one of {PRECISIONS}, got {precision!r}")


def resolve_precision(precision, device) -> str:
    """``precision``, or what PyTorch's flags permit for convolutions on ``device`` at this moment."""
    check_precision(precision)
    if precision is None:
        return "tf32" if permits_tf32() and device.type == "cuda" else "fp32"
    return precision


def permits_tf32() -> bool:
    """``torch.backends.cudnn.conv.fp32_precision == "tf32"``, in a tenth of its time."""
    return torch._C._get_fp32_precision_getter("cuda", "conv") == "tf32"


def modes(precision, device) -> tuple:
    """``Modes`` at this moment, for a call on ``device`` that asks for ``precision``; a plain tuple, as each call makes one."""
    return resolve_precision(precision, device), precision is None, is_transformed(), autocasts(device)


def kind(name, tensor) -> tuple:
    """The ``Kind`` of a tensor, a plain tuple too. Raises TypeError for another object."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")
    return tensor.shape, tensor.dtype, tensor.device, tensor.layout


def kinds(x, weight, bias) -> tuple:
    """Of a call's tensors; None for no bias."""
    return kind("x", x), kind("weight", weight), None if bias is None else kind("bias", bias)


def check_float(name, given):
    """Raises TypeError unless a ``kind`` is dense, real and of floating point."""
    _, dtype, _, layout = given
    if not dtype.is_floating_point:
        raise TypeError(f"{name} must have a real floating-point dtype, got {dtype}")
    if layout != torch.strided:
        raise TypeError(f"{name} must be dense (torch.strided), got layout {layout}")


def check_tensors(x, weight, bias, autocast):
    """Raises TypeError and ValueError for ``kinds`` that do not fit a transposed convolution, whatever its geometry."""
    named = {name: Kind(*given) for name, given in (("x", x), ("weight", weight), ("bias", bias)) if given is not None}
    for name, given in named.items():
        check_float(name, given)
    x, weight, bias = named["x"], named["weight"], named.get("bias")
    for name, given in named.items():
        if given.dtype != x.dtype and not autocast:
            raise TypeError(f"{name} must have x's dtype {x.dtype}, got {given.dtype}")
        if given.device != x.device:
            raise ValueError(f"{name} must be on x's device {x.device}, got {given.device}")
    if len(x.shape) not in (3, 4):
        raise ValueError(f"x must be 4-D [N, C_in, H, W] or 3-D [C_in, H, W], got shape {tuple(x.shape)}")
    if len(weight.shape) != 4:
        raise ValueError(f"weight must be 4-D [C_in, C_out, KH, KW], got shape {tuple(weight.shape)}")
    if 0 in weight.shape:
        raise ValueError(f"weight must have no dimension of size 0, got shape {tuple(weight.shape)}")
    if bias is not None and bias.shape != weight.shape[1:2]:
        raise ValueError(f"bias must have shape ({weight.shape[1]},), got {tuple(bias.shape)}")


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
