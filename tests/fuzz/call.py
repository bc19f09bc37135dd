"""One call of the layer: its sizes and options, its text form, and the tensors that are drawn from its seed."""

import ast
import math
from dataclasses import dataclass, fields

import torch

from numba_impl.backends import BACKENDS
from numba_impl.case import Case
from tests.cases import VIEWS

# Factors of the values of a tensor: one for each index along these axes; "sparse" leaves one value in twenty.
MIXES = {"even": (), "axis0": (0,), "axis1": (1,), "axis2": (2,), "axis3": (3,), "values": (0, 1, 2, 3), "sparse": ()}
MIXED = 4  # powers of ten up and down
SPECIAL = {
    "none": None,
    "denormal": lambda info: info.tiny / 8,
    "minus_zero": lambda info: -0.0,
    "least": lambda info: info.tiny,
    "huge": lambda info: 0.9 * info.max,
    "inf": lambda info: math.inf,
    "minus_inf": lambda info: -math.inf,
    "nan": lambda info: math.nan,
}
CHOICES = {
    "dtype": ("float32", "float64", "float16", "bfloat16"),
    "parameters": ("", "float32", "float16", "bfloat16"),
    "autocast": ("", "float16", "bfloat16"),
    "layout": tuple(VIEWS),
    "weight_layout": tuple(view for view in VIEWS if view != "expanded"),  # products of two expanded are not independent
    "x_mix": tuple(MIXES),
    "weight_mix": tuple(MIXES),
    "x_special": tuple(SPECIAL),
    "weight_special": tuple(SPECIAL),
    "bias_special": tuple(SPECIAL),
    "precision": ("fp32", "tf32", "flags"),
    "backend": ("dispatch", *BACKENDS),
    "form": ("function", "module", "unbatched"),
    "place": ("plain", "stream", "graph"),
    "gradient": ("", "xwb", "x", "w", "b", "xw", "wb"),
    "device": ("cpu", "cuda"),
}
NAMED = ("dtype", "precision", "form", "place")  # choices that tell what they are


@dataclass(frozen=True)
class Call(Case):
    """A call of a case, ``x`` batched and the other numbers pairs. Exponents are of ten. ValueError if it is impossible."""

    x: tuple = (1, 1, 1, 1)
    out_channels: int = 1
    kernel_size: tuple = (1, 1)
    stride: tuple = (1, 1)
    padding: tuple = (0, 0)
    output_padding: tuple = (0, 0)
    bias: bool = True
    add_value: float = 0.5
    scale: float = 2.0
    dtype: str = "float32"  # of x
    parameters: str = ""  # their dtype, x's by default
    autocast: str = ""  # the dtype to which it casts; off by default
    layout: str = "contiguous"  # of x, and of the gradient at the output
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
        for field in fields(self):
            name, value, default = field.name, getattr(self, field.name), field.default
            if _types(value) != _types(default):
                raise ValueError(f"{name} must be like {default}, got {value!r}")
            if value not in CHOICES.get(name, (value,)):
                raise ValueError(f"{name} must be one of {CHOICES[name]}, got {value!r}")
        if min(*self.output_shape[1:], *self.x[1:], self.x[0] + 1) < 1:
            raise ValueError(f"sizes must be positive, but for the batch's, got {self.x} to {self.output_shape}")
        if self.parameters not in ("", self.dtype) and (not self.autocast or self.dtype == "float64"):
            raise ValueError("the parameters must have the dtype of x where autocast casts neither")
        if self.form == "unbatched" and self.x[0] != 1:
            raise ValueError("x must have a batch of 1 if it is to be unbatched")
        if "b" in self.gradient and not self.bias:
            raise ValueError("there is no bias to have a gradient")

    @classmethod
    def parse(cls, text) -> "Call":
        """The call that ``str`` gave. Raises ValueError and TypeError that say what is wrong."""
        return cls(**{name: _value(value) for name, _, value in (item.partition("=") for item in text.split())})

    def __str__(self):
        return " ".join(f"{name}={value}".replace(" ", "") for name, value in self.unusual.items())

    @property
    def unusual(self) -> dict:
        """What differs from the defaults."""
        return {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}

    @property
    def kinds(self) -> list[str]:
        """What is unusual about it, in words to be counted."""
        return [value if name in NAMED else name for name, value in self.unusual.items() if name in {*CHOICES} - {"device"}]

    @property
    def options(self) -> dict:
        """The arguments ``precision`` and ``backend``."""
        usual = "flags", "dispatch"
        return {name: None if (value := getattr(self, name)) in usual else value for name in ("precision", "backend")}

    @property
    def under_autocast(self) -> torch.autocast:
        """The context in which the layer is called."""
        return torch.autocast(self.device, getattr(torch, self.autocast or "bfloat16"), enabled=bool(self.autocast))

    @property
    def result_dtype(self) -> str:
        """Autocast leaves float64 as it is."""
        return self.autocast if self.autocast and self.dtype != "float64" else self.dtype

    def draw_operands(self) -> dict[str, torch.Tensor]:
        """x, weight, bias if there is one, and gy for a gradient."""
        random, parameters = torch.Generator(self.device).manual_seed(self.seed), self.parameters or self.dtype
        x = self._draw(random, self.x, self.dtype, self.x_exponent, self.x_mix, self.x_special)
        weight = self._draw(random, self.weight_shape, parameters, self.weight_exponent, self.weight_mix, self.weight_special)
        tensors = {"x": VIEWS[self.layout](x), "weight": VIEWS[self.weight_layout](weight)}
        if self.bias:
            bias = self._draw(random, (self.out_channels,), parameters, special=self.bias_special)
            tensors["bias"] = bias if self.weight_layout == "contiguous" else bias.repeat_interleave(2)[::2]
        if self.gradient:
            tensors["gy"] = VIEWS[self.layout](self._draw(random, self.output_shape, self.result_dtype))
        return tensors

    def _draw(self, random, shape, dtype, exponent=0, mix="even", special="none"):
        options = dict(generator=random, device=self.device, dtype=torch.float64)
        t = torch.randn(shape, **options) * 10.0**exponent
        if mix == "sparse":
            t *= torch.rand(shape, **options) < 0.05
        elif mix != "even":
            t *= 10 ** (MIXED * (2 * torch.rand([n if axis in MIXES[mix] else 1 for axis, n in enumerate(shape)], **options) - 1))
        t = t.to(getattr(torch, dtype))
        if special != "none" and t.numel():
            places = torch.randint(t.numel(), (min(2, t.numel()),), generator=random, device=self.device)
            t.view(-1)[places] = SPECIAL[special](torch.finfo(t.dtype))
        return t


def _types(value):
    return [*map(type, value)] if isinstance(value, tuple) else type(value)


def _value(text):
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
