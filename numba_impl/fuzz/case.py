"""A case: one call of the layer, its text form, and the tensors that are drawn from its seed."""

import ast
import dataclasses
import math
from typing import NamedTuple

import torch

from numba_impl import dispatch
from numba_impl.problem import Geometry

LAYOUTS = {
    "contiguous": lambda t: t,
    "channels_last": lambda t: t.to(memory_format=torch.channels_last),
    "sliced": lambda t: torch.cat([t, t, t], 3)[:, :, :, 1 : 1 + t.shape[3]],
    "every_second": lambda t: t.repeat_interleave(2, 2)[:, :, ::2],
    "transposed": lambda t: t.transpose(2, 3).contiguous().transpose(2, 3),
    "batch_last": lambda t: t.permute(1, 2, 3, 0).contiguous().permute(3, 0, 1, 2),
    "offset": lambda t: torch.cat([t.new_zeros(1), t.flatten()])[1:].view(t.shape),
    "expanded": lambda t: t[:1, :1].expand_as(t),
}
# Factors of the values of a tensor: one a value, or one for each index along an axis.
MIXES = {"even": None, "axis0": 0, "axis1": 1, "axis2": 2, "axis3": 3, "values": (0, 1, 2, 3), "sparse": None}
MIXED = 4  # powers of ten up and down
SPECIAL = ("none", "denormal", "minus_zero", "least", "huge", "inf", "minus_inf", "nan")
GRADIENTS = ("", "xwb", "x", "w", "b", "xw", "wb")
CHOICES = {
    "dtype": ("float32", "float64", "float16", "bfloat16"),
    "layout": tuple(LAYOUTS),
    "weight_layout": tuple(LAYOUTS)[:-1],  # products of two expanded tensors are not independent
    "x_mix": tuple(MIXES),
    "weight_mix": tuple(MIXES),
    "x_special": SPECIAL,
    "weight_special": SPECIAL,
    "bias_special": SPECIAL,
    "precision": ("fp32", "tf32", "flags"),
    "backend": ("dispatch", *dispatch.BACKENDS),
    "form": ("function", "module", "unbatched"),
    "place": ("plain", "stream", "graph"),
    "gradient": GRADIENTS,
}


@dataclasses.dataclass(frozen=True)
class Case:
    """One call: ``x`` is (N, C_in, H, W), tensors are drawn from ``seed``, exponents are of ten. ValueError if impossible."""

    x: tuple = (1, 1, 1, 1)
    out: int = 1
    kernel: tuple = (1, 1)
    stride: tuple = (1, 1)
    padding: tuple = (0, 0)
    extra: tuple = (0, 0)  # output_padding
    bias: bool = True
    add: float = 0.5
    scale: float = 2.0
    dtype: str = "float32"
    layout: str = "contiguous"
    weight_layout: str = "contiguous"
    x_exponent: int = 0
    weight_exponent: int = 0
    x_mix: str = "even"
    weight_mix: str = "even"
    x_special: str = "none"
    weight_special: str = "none"
    bias_special: str = "none"
    precision: str = "fp32"
    backend: str = "dispatch"
    form: str = "function"
    place: str = "plain"
    gradient: str = ""
    device: str = "cpu"
    seed: int = 0

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value, default = getattr(self, field.name), field.default
            if not isinstance(value, (int, float) if type(default) is float else type(default)):
                raise ValueError(f"{field.name} must be of type {type(default).__name__}, got {value!r}")
            if isinstance(default, tuple) and (len(value) != len(default) or not all(type(number) is int for number in value)):
                raise ValueError(f"{field.name} must be {len(default)} ints, got {value!r}")
            if value not in CHOICES.get(field.name, (value,)):
                raise ValueError(f"{field.name} must be one of {CHOICES[field.name]}, got {value!r}")
        if min(self.x) < 0 or min(self.x[1:]) < 1 or self.out < 1:
            raise ValueError(f"x and out must be positive, but for x's batch, got {self.x} and {self.out}")
        if min(self.output_shape[2:]) < 1:
            raise ValueError("the output must have at least one row and column")
        if self.form == "unbatched" and self.x[0] != 1:
            raise ValueError("x must have a batch of 1 if it is to be unbatched")
        if self.gradient and self.dtype not in ("float32", "float64"):
            raise ValueError(f"gradients are checked in float32 and float64 alone, not in {self.dtype}")
        if "b" in self.gradient and not self.bias:
            raise ValueError("there is no bias to have a gradient")

    def __str__(self):
        """What differs from the defaults, as ``parse_case`` reads it."""
        named = ((field.name, getattr(self, field.name), field.default) for field in dataclasses.fields(self))
        text = {name: value if isinstance(value, str) else repr(value) for name, value, default in named if value != default}
        return " ".join(f"{name}={value}".replace(" ", "") for name, value in text.items())

    @property
    def kinds(self):
        """What is unusual about it, in words to be counted."""
        words = {
            "gradient": self.gradient,
            "forced": self.backend != "dispatch",
            "strided": (self.layout, self.weight_layout) != ("contiguous", "contiguous"),
            "scaled": (self.x_exponent, self.weight_exponent, self.x_mix, self.weight_mix) != (0, 0, "even", "even"),
            "special": (self.x_special, self.weight_special, self.bias_special) != ("none", "none", "none"),
        }
        usual = "float32", "fp32", "function", "plain"
        named = self.dtype, self.precision, self.form, self.place
        return [word for word, holds in words.items() if holds] + [name for name in named if name not in usual]

    @property
    def geometry(self):
        return Geometry.of(self.kernel, self.stride, self.padding, self.extra)

    @property
    def output_shape(self):
        rows, cols = self.geometry.rows, self.geometry.cols
        return self.x[0], self.out, rows.output_size(self.x[2]), cols.output_size(self.x[3])

    @property
    def terms(self):
        """The most that any output adds up."""
        taps = 1
        for axis in (self.geometry.rows, self.geometry.cols):
            taps *= max(axis.parities.count(parity) for parity in axis.parities)
        return self.x[1] * taps + self.bias


def parse_case(text) -> Case:
    """The case that ``str`` gave. Raises ValueError that says what is wrong."""
    fields = {field.name: field.default for field in dataclasses.fields(Case)}
    values = {}
    for item in text.split():
        name, _, value = item.partition("=")
        if name not in fields:
            raise ValueError(f"{name!r} is none of {', '.join(fields)}")
        try:
            values[name] = value if isinstance(fields[name], str) else ast.literal_eval(value)
        except (ValueError, SyntaxError):
            raise ValueError(f"{item!r} has no value that can be read") from None
    return Case(**values)


def precision_of(case):
    return None if case.precision == "flags" else case.precision


class Operand(NamedTuple):
    """A tensor, and the memory that it lies in as one flat tensor, with what lies between its values."""

    tensor: torch.Tensor
    memory: torch.Tensor

    @classmethod
    def of(cls, tensor):
        size = tensor.untyped_storage().nbytes() // tensor.element_size()
        return cls(tensor, tensor.as_strided((size,), (1,), 0))

    def blank(self):
        """Another of the same layout, all zeros."""
        memory = torch.zeros_like(self.memory)
        return Operand(memory.as_strided(self.tensor.shape, self.tensor.stride(), self.tensor.storage_offset()), memory)


def draw_operands(case: Case) -> dict[str, Operand]:
    """x, weight, bias if there is one, and gy for a gradient."""
    generator = torch.Generator(case.device).manual_seed(case.seed)
    tensors = {
        "x": _draw(case, case.x, case.x_exponent, case.x_mix, case.x_special, generator),
        "weight": _draw(
            case, (case.x[1], case.out, *case.kernel), case.weight_exponent, case.weight_mix, case.weight_special, generator
        ),
    }
    tensors["weight"] = LAYOUTS[case.weight_layout](tensors["weight"])
    if case.bias:
        bias = _draw(case, (case.out,), 0, "even", case.bias_special, generator)
        tensors["bias"] = bias if case.weight_layout == "contiguous" else bias.repeat_interleave(2)[::2]
    if case.gradient:
        tensors["gy"] = LAYOUTS[case.layout](_draw(case, case.output_shape, 0, "even", "none", generator))
    tensors["x"] = LAYOUTS[case.layout](tensors["x"])
    return {name: Operand.of(tensor) for name, tensor in tensors.items()}


def _draw(case, shape, exponent, mix, special, generator):
    options = dict(device=case.device, dtype=torch.float64)
    t = torch.randn(shape, generator=generator, **options) * 10.0**exponent
    if mix == "sparse":
        t *= torch.rand(shape, generator=generator, **options) < 0.05
    elif mix != "even":
        axes = MIXES[mix] if isinstance(MIXES[mix], tuple) else (MIXES[mix],)
        factors = torch.rand([n if axis in axes else 1 for axis, n in enumerate(shape)], generator=generator, **options)
        t *= 10.0 ** (2 * MIXED * factors - MIXED)
    t = t.to(getattr(torch, case.dtype))
    if special != "none" and t.numel():
        info = torch.finfo(t.dtype)
        values = {"denormal": info.tiny / 8, "minus_zero": -0.0, "least": info.tiny, "huge": 0.9 * info.max}
        values |= {"inf": math.inf, "minus_inf": -math.inf, "nan": math.nan}
        places = torch.randint(t.numel(), (min(2, t.numel()),), generator=generator, device=case.device)
        t.view(-1)[places] = values[special]
    return t
