"""Differential fuzzing of the layer: drawn calls, each compared with float64, until one is wrong or the time is up.

python -m numba_impl.fuzz --minutes 10 --seed 1 --device cuda     drawn calls
python -m numba_impl.fuzz --case 'x=(2,3,5,7) out=4 seed=1'       one call, as a failure prints it

What is not named in a case is as in ``Case``. Needs hypothesis, of the extra ``test``, to draw and to shrink.

How far from float64 a result may be; u is half the spacing of the result's dtype at 1, T the most terms of a sum:

*Pre-activation.* T products of either sign, summed in any order, are off by a random walk of 0.3 u sqrt(T) spread (root
mean square), where spread = sqrt(sum of the squared products): 8 u sqrt(T) spread bounds each value, which is 27 times
that. TF32 adds 4 * 2^-11 spread, underflow T times the smallest normal number. The tensor-core kernel scales the pixels'
largest |x|, and cuDNN may transform whole images (Winograd, FFT): theirs may be off by 4 u T max |x| max |w| instead,
over a pixel or an image, and over an output channel.

*Output.* What the epilogue makes of that interval, widened by its own rounding: |v| u where v < 0, as exp's argument is
rounded, and 8 u of mish; 4 u of add_value and of the result. In L2 the error is at most u (sqrt(T) + 8) of what is summed,
scale * (spread + |add_value|), if many outputs take part. Where the products' magnitudes add up to more than a quarter of the
dtype's range, a partial sum may overflow, and any result within the clamp's bounds, or NaN, is right.

*NaN and infinities* are float64's, but 0 times an infinite weight, beyond the image's edge, may count; where cuDNN
spreads them is torch's affair.

*Gradients.* That at the pre-activation is off by its rounding and, where rounding decides on which side of a clamp's
bound the pre-activation lies, by all of it: these are added up in magnitude; the pre-activation's random error in squares.
The sums over it are a convolution's again.
"""

import argparse
import ast
import collections
import dataclasses
import math
import random
import shlex
import sys
import time
from typing import NamedTuple

import torch
from torch import nn

from numba_impl import dispatch, functional, reference
from numba_impl.problem import Constants, Geometry, resolve_precision

MISH_SLOPE_ZERO, MISH_LEAST, MISH_CURVATURE = -1.1924, -0.30885, 0.65
TF32_U = 2.0**-11
MANY = 64  # outputs, from which on an L2 error is a bounded multiple of its root mean square
SHRINKING = 60.0  # seconds
# On CUDA a geometry compiles a kernel of some 3 s for the forward, the backward, each precision and each alignment: all cases
# of a round share a few geometries, and there is one more after each round in which compiling has died down.
ROUND, BUSY = 10.0, 100  # seconds; cases
WHILE = 200_000  # clock cycles that a side stream is late


def expanded(t):
    return t[:1, :1].expand_as(t)


LAYOUTS = {
    "contiguous": lambda t: t,
    "channels_last": lambda t: t.to(memory_format=torch.channels_last),
    "sliced": lambda t: torch.cat([t, t, t], 3)[:, :, :, 1 : 1 + t.shape[3]],
    "every_second": lambda t: t.repeat_interleave(2, 2)[:, :, ::2],
    "transposed": lambda t: t.transpose(2, 3).contiguous().transpose(2, 3),
    "batch_last": lambda t: t.permute(1, 2, 3, 0).contiguous().permute(3, 0, 1, 2),
    "offset": lambda t: torch.cat([t.new_zeros(1), t.flatten()])[1:].view(t.shape),
    "expanded": expanded,
}
# Factors of the values of a tensor: one a value, or one for each index along an axis.
MIXES = {"even": None, "axis0": 0, "axis1": 1, "axis2": 2, "axis3": 3, "values": (0, 1, 2, 3), "sparse": None}
MIXED = 4  # powers of ten up and down
SPECIAL = ("none", "denormal", "minus_zero", "least", "huge", "inf", "minus_inf", "nan")
FINITE = SPECIAL[:4]  # and small
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
SERVING = {"cpu": ("cpu", "reference"), "cuda": ("hopper", "tiled", "composite", "reference")}
ADD_VALUES = (0.5, 0.0, -0.5, 1.0, -1.0, 0.30884, -2.0, 3.0, 1e-30, -1e-40, 50.0, -50.0, 1e10, -1e38)
SCALES = (2.0, 1.0, 0.0, -1.0, -0.7, 1e-3, 1e-30, 1e-40, 1e30, -1e38)


class Wrong(Exception):
    """A call whose result is not float64's, or that raised."""


class Over(BaseException):
    """The time for a round is over; hypothesis lets it through."""


class Lost(BaseException):
    """The GPU's context is lost, so that nothing can be shrunk."""


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
        rows, cols = self.geometry.rows, self.geometry.cols
        if min(rows.output_size(self.x[2]), cols.output_size(self.x[3])) < 1:
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
    def geometry(self):
        return Geometry.of(self.kernel, self.stride, self.padding, self.extra)

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


# ---- the data of a case


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
        rows, cols = case.geometry.rows, case.geometry.cols
        shape = case.x[0], case.out, rows.output_size(case.x[2]), cols.output_size(case.x[3])
        tensors["gy"] = LAYOUTS[case.layout](_draw(case, shape, 0, "even", "none", generator))
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


# ---- one call


def run_case(case: Case) -> str:
    """Run a case and compare it; the name of the backend that served, or "declined". Raises Wrong."""
    try:
        operands = draw_operands(case)
        before = {name: operand.memory.clone() for name, operand in operands.items()}
        name, reason = served_by(case, operands)
        if name == "declined":
            check_declined(case, operands, reason)
            return name
        y, *gradients = run(case, operands)
        for operand, memory in zip(operands.values(), before.values()):
            _demand(torch.equal(operand.memory.view(torch.uint8), memory.view(torch.uint8)), "an argument was changed")
            shares = y.numel() and y.untyped_storage().data_ptr() == operand.memory.untyped_storage().data_ptr()
            _demand(not shares, "the result shares memory with an argument")
        check(case, name, {name: operand.tensor for name, operand in operands.items()}, y, gradients)
    except Exception as error:
        if "CUDA error" in str(error) or "CUDA_ERROR" in str(error):
            raise Lost(f"{type(error).__name__}: {error}") from error
        raise Wrong(str(error) if isinstance(error, Wrong) else f"{type(error).__name__}: {error}") from error
    return name


def _demand(condition, message):
    if not condition:
        raise Wrong(message)


def _forced(case):
    return None if case.backend == "dispatch" else case.backend


def _precision(case):
    return None if case.precision == "flags" else case.precision


def served_by(case, operands):
    """(backend, "") or ("declined", why)."""
    x, weight, bias = (operands[name].tensor if name in operands else None for name in ("x", "weight", "bias"))
    _, problem = functional.describe(x, weight, bias, case.stride, case.padding, case.extra, _precision(case))
    if case.backend != "dispatch":
        ok, reason = dispatch.BACKENDS[case.backend].supports(problem)
        return (case.backend, "") if ok else ("declined", reason)
    return dispatch.choose(problem)[0], ""


def check_declined(case, operands, reason):
    try:
        step(case, {name: operand.tensor for name, operand in operands.items()})
    except ValueError as error:
        _demand(reason in str(error), f"the error does not say why {case.backend} declines: {error}")
        return
    raise Wrong(f"{case.backend} served though it declines: {reason}")


def step(case, tensors):
    """[the layer's result, batched, and each gradient asked for], by the form asked for."""
    names = dict(zip("xwb", ("x", "weight", "bias")))
    leaves = {name: tensor.detach() for name, tensor in tensors.items()}
    wanted = [leaves[names[letter]].requires_grad_() for letter in case.gradient]
    x = leaves["x"][0] if case.form == "unbatched" else leaves["x"]
    with torch.set_grad_enabled(bool(case.gradient)):
        if case.form == "module":
            y = _module(case, leaves)(x)
        else:
            y = functional.conv_transpose2d_mish_add_hardtanh_scale(
                *(x, leaves["weight"], leaves.get("bias"), case.stride, case.padding, case.extra),
                **dict(add_value=case.add, scale=case.scale, precision=_precision(case), backend=_forced(case)),
            )
    gradients = torch.autograd.grad(y, wanted, tensors["gy"].view_as(y) if y.dim() == 4 else tensors["gy"][0]) if wanted else ()
    return [y.detach().unsqueeze(0) if case.form == "unbatched" else y.detach(), *gradients]


def _module(case, leaves):
    from model_numba import ModelNumba

    settings = case.kernel, case.stride, case.padding, case.extra
    conv = nn.ConvTranspose2d(case.x[1], case.out, *settings, bias=case.bias, device="meta")
    for name in ("weight", "bias") if case.bias else ("weight",):
        delattr(conv, name)
        setattr(conv, name, leaves[name])  # the leaf itself, so that its gradient can be asked for
    return ModelNumba.from_conv(conv, case.add, case.scale, precision=_precision(case), backend=_forced(case))


def run(case, operands):
    """``step`` at its place. Elsewhere than there, the data arrive after a delay in memory of zeros."""
    if case.device == "cpu" or case.place == "plain" or case.x[0] == 0:
        return step(case, {name: operand.tensor for name, operand in operands.items()})
    late = {name: operand.blank() for name, operand in operands.items()}
    tensors = {name: operand.tensor for name, operand in late.items()}
    side, current = torch.cuda.Stream(), torch.cuda.current_stream()

    def arrive():
        torch.cuda._sleep(WHILE)
        for name, operand in late.items():
            operand.memory.copy_(operands[name].memory)

    side.wait_stream(current)
    with torch.cuda.stream(side):
        if case.place == "stream":
            arrive()
        results = step(case, tensors)  # for a graph: compiles, and cuDNN chooses
    current.wait_stream(side)
    torch.cuda.synchronize()
    if case.place == "graph":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = step(case, tensors)
        arrive()
        graph.replay()
        results = [result.clone() for result in results]
        torch.cuda.synchronize()
    return results


# ---- the comparison


class Truth(NamedTuple):
    """The pre-activation in float64, its spread, how far from it a result's may be, and where none is certain."""

    pre: torch.Tensor
    spread: torch.Tensor  # if need be, as much as its error is larger than the bound of independent products
    error: torch.Tensor
    unsure: torch.Tensor  # a sum may have overflowed
    maybe_nan: torch.Tensor


class Rules(NamedTuple):
    """What the case and its backend decide of the bounds."""

    u: float
    tiny: float
    largest: float
    tf32: float  # error of a product
    cudnn: bool
    constants: Constants

    @classmethod
    def of(cls, case, name):
        info = torch.finfo(getattr(torch, case.dtype))
        cudnn = case.device == "cuda" and name in ("composite", "reference")
        permitted = case.device == "cuda" and case.dtype == "float32"
        tf32 = permitted and resolve_precision(_precision(case), torch.device("cuda")) == "tf32"
        tiny = info.smallest_normal if case.dtype != "float16" else 2.0**-24  # its denormals are never flushed
        kept = torch.float64 if case.dtype == "float64" else torch.float32  # of the constants
        constants = Constants(*(torch.tensor(value, dtype=kept).item() for value in Constants.of(case.add, case.scale)))
        return cls(info.eps / 2, tiny, info.max, 4 * TF32_U if tf32 else 0.0, cudnn, constants)


def check(case, name, tensors, y, gradients):
    """Raises Wrong unless the result and the gradients are float64's, within what rounding allows."""
    x = tensors["x"]
    rules, rows, cols = Rules.of(case, name), case.geometry.rows, case.geometry.cols
    shape = x.shape[0], case.out, rows.output_size(x.shape[2]), cols.output_size(x.shape[3])
    _demand(y.shape == shape, f"the result's shape is {tuple(y.shape)}, not {shape}")
    _demand(y.dtype == x.dtype and y.device == x.device, f"the result is {y.dtype} on {y.device}")
    if not all(tensor.isfinite().all() for tensor in tensors.values()):  # whose places cuDNN's float64 would spread
        tensors, y = {name: tensor.cpu() for name, tensor in tensors.items()}, y.cpu()
    wide = {name: tensor.detach().double() for name, tensor in tensors.items()}
    truth = truth_of(case, name, rules, wide)
    check_output(case, rules, truth, y.double())
    for letter, gradient in zip(case.gradient, gradients):
        operand = wide[dict(x="x", w="weight", b="bias")[letter]]
        _demand(gradient.shape == operand.shape, f"the shape of the gradient of {letter} is {tuple(gradient.shape)}")
        _demand(gradient.dtype == x.dtype, f"the gradient of {letter} is {gradient.dtype}")
    if gradients and not truth.unsure.any() and truth.pre.isfinite().all():
        check_gradients(case, name, rules, truth, wide, gradients)


def truth_of(case, name, rules, wide) -> Truth:
    x, weight, bias = wide["x"], wide["weight"], wide.get("bias")

    def convolved(x, weight, bias=None):
        return reference.conv_transpose2d(x, weight, bias, case.geometry)

    def finite(t, power=1):
        return None if t is None else t.nan_to_num(0, 0, 0).abs().pow(power)

    pre = convolved(x, weight, bias)
    spread = convolved(finite(x, 2), finite(weight, 2), finite(bias, 2)).sqrt()
    error = 8 * rules.u * case.terms**0.5 * spread
    if rules.cudnn or name == "hopper":
        largest = finite(x).amax((1, 2, 3) if rules.cudnn else 1, keepdim=True)
        near = convolved(largest.expand(-1, 1, *x.shape[2:]), torch.ones_like(weight[:1, :1])) if not rules.cudnn else largest
        floor = 4 * rules.u * case.terms * near * finite(weight).amax((0, 2, 3)).view(1, -1, 1, 1)
        spread = spread.clamp(min=floor / (8 * rules.u * case.terms**0.5))
        error = torch.maximum(error, floor.expand_as(error))
    if rules.cudnn:  # may flush operands
        flushed = [torch.where(finite(t) < rules.tiny, finite(t), 0) for t in (x, weight)]
        if any(t.any() for t in flushed):
            error = error + convolved(flushed[0], finite(weight)) + convolved(finite(x), flushed[1])
    error = error + rules.tf32 * spread + case.terms * rules.tiny
    magnitudes = convolved(finite(x), finite(weight), finite(bias))
    unsure = ~(magnitudes <= rules.largest / 4) | ~error.isfinite()
    maybe_nan = ~weight.isfinite().all(0).flatten(1).all(1).view(1, -1, 1, 1)
    if rules.cudnn:
        unsure = unsure | maybe_nan | ~x.isfinite().flatten(1).all(1).view(-1, 1, 1, 1)
    return Truth(pre, spread, error, unsure, maybe_nan.expand_as(pre))


def check_output(case, rules, truth, y):
    """Value by value, and in L2."""
    constants, infinite = rules.constants, truth.pre == math.inf
    finite, nan = truth.pre.isfinite(), ~truth.pre.isfinite() & ~infinite
    pre = torch.where(finite, truth.pre, infinite * 1e300)  # which mish, add and clamp treat alike
    low, high = output_range(rules, pre, torch.where(finite & ~truth.unsure, truth.error, 0.0))
    want = reference.mish_add_hardtanh_scale(pre, constants)
    limit = abs(constants.scale) * (1 + 4 * rules.u) + rules.tiny
    possible = y.isnan() | (y.abs() <= (limit if limit < rules.largest else math.inf))
    # Torch may round add_value to fp16, which makes it infinite.
    maybe_nan = truth.maybe_nan | (infinite if abs(constants.add_value) > rules.largest else False)
    good = torch.where(nan, y.isnan(), (low <= y) & (y <= high)) | (maybe_nan & y.isnan())
    good = torch.where(truth.unsure, possible, good)
    if not good.all():
        places = good.logical_not().nonzero()
        at = tuple(places[0].tolist())
        got, expected, least, most, z, z_error = (t[at].item() for t in (y, want, low, high, truth.pre, truth.error))
        raise Wrong(
            f"{len(places)} of {good.numel()} values wrong; the first at {at}: got {got!r}, want {expected!r}, "
            f"{least!r} to {most!r} (pre-activation {z!r} within {z_error:.3g})"
        )
    compared = finite & ~truth.unsure & y.isfinite()
    summed = torch.where(compared, truth.spread + abs(constants.add_value), 0.0)
    check_l2(case, rules, torch.where(compared, y - want, 0.0), summed)


def output_range(rules, pre, error):
    """(least, largest) result from the pre-activations within ``error`` of ``pre``."""
    u, constants = rules.u, rules.constants
    first, last = pre - error, pre + error
    ends = [nn.functional.mish(end) for end in (first, last)]
    least = torch.minimum(*ends).masked_fill((first < MISH_SLOPE_ZERO + 1e-4) & (last > MISH_SLOPE_ZERO - 1e-4), MISH_LEAST)
    most = torch.maximum(*ends)
    size = torch.maximum(least.abs(), most.abs()).clamp(max=1 + abs(constants.add_value))  # past this it is clamped
    rounding = u * (8 + (-first).clamp(0, 150)) * size + 4 * u * abs(constants.add_value) + 1024 * rules.tiny
    bounds = [
        (value + constants.add_value).clamp(constants.min_val, constants.max_val) * constants.scale
        for value in (least - rounding, most + rounding)
    ]
    low, high = torch.minimum(*bounds), torch.maximum(*bounds)
    low, high = low - 4 * u * low.abs() - rules.tiny, high + 4 * u * high.abs() + rules.tiny
    edge = rules.largest * (1 - 4 * u)
    low, high = low.masked_fill(low <= -edge, -math.inf), high.masked_fill(high >= edge, math.inf)
    return low.clamp(max=rules.largest), high.clamp(min=-rules.largest)


def check_l2(case, rules, differences, summed):
    summed = abs(rules.constants.scale) * summed
    largest = summed.amax().item() if summed.numel() else 0.0
    if not 0 < largest < math.inf:
        return
    squares = (summed / largest).square()
    if squares.sum() ** 2 < MANY * squares.square().sum():  # few decide
        return
    limit = rules.u * (case.terms**0.5 + 8) + (TF32_U if rules.tf32 else 0)
    wrong, size = (differences / largest).norm().item(), squares.sum().sqrt().item()
    floor = 1024 * rules.tiny * max(1.0, abs(rules.constants.scale)) * summed.numel() ** 0.5 / largest
    _demand(wrong <= limit * size + floor, f"relative L2 error {wrong / size:.3g}, allowed {limit:.3g}")


def check_gradients(case, name, rules, truth, wide, gradients):
    """Of finite operands."""
    x, weight, gy = (wide[name] for name in ("x", "weight", "gy"))
    g, size, certain, random_error = gradient_at_pre_activation(rules, truth, gy)
    if (size > rules.largest / 4).any():  # may overflow, and then be anything
        return

    def backward(g, x, weight):
        settings = case.stride, case.padding, (1, 1), True, case.extra
        return torch.ops.aten.convolution_backward(g, x, weight, [case.out], *settings, 1, [True, True, True])

    wants, magnitudes = backward(g, x, weight), backward(size, x.abs(), weight.abs())
    linear, quadratic, squares = (
        backward(certain, x.abs(), weight.abs()),
        backward(random_error.square(), x.square(), weight.square()),
        backward(g.square(), x.square(), weight.square()),
    )
    by_flags = name == "reference" and resolve_precision(None, x.device) == "tf32"  # as torch differentiates the eager chain
    tf32 = 4 * TF32_U if by_flags else rules.tf32
    pixels = g.shape[0] * x.shape[2] * x.shape[3]
    terms = case.out * math.prod(case.kernel), pixels, g.shape[0] * math.prod(g.shape[2:])
    top_g, top_x, top_w = (t.abs().max().item() if t.numel() else 0.0 for t in (g, x, weight))
    for letter, got in zip(case.gradient, gradients):
        k = "xwb".index(letter)
        want, count = wants[k], terms[k]
        spread = squares[k].sqrt()
        error = 8 * rules.u * count**0.5 * spread + tf32 * (spread if letter != "b" else 0)
        if case.device == "cuda" and letter != "b":
            error = error.clamp(min=4 * rules.u * count * top_g * (top_w if letter == "x" else top_x))  # of cuDNN's transforms
        error = error + linear[k] + quadratic[k].sqrt() + 4 * rules.u * want.abs() + (1 + count) * rules.tiny
        good = ((got.double() - want).abs() <= error) | ~(magnitudes[k] <= rules.largest / 4)
        if not good.all():
            places = good.logical_not().nonzero()
            at = tuple(places[0].tolist())
            raise Wrong(
                f"{len(places)} of {good.numel()} values of the gradient of {letter} wrong; the first at {at}: "
                f"got {got[at].item()!r}, want {want[at].item()!r} within {error[at].item():.3g}"
            )


def gradient_at_pre_activation(rules, truth, gy):
    """(the gradient, its largest factor, its error to be added up in magnitude, and that to be added up in squares)."""
    u, constants, z, z_error = rules.u, rules.constants, truth.pre, truth.error
    tanh = torch.tanh(nn.functional.softplus(z))
    slope = torch.ops.aten.mish_backward(torch.ones_like(z), z)
    value = nn.functional.mish(z) + constants.add_value
    value_error = u * (8 - z.clamp(-150, 0)) * (value - constants.add_value).abs() + 1024 * rules.tiny
    value_error = value_error + 4 * u * (abs(constants.add_value) + value.abs()) + 1.09 * z_error
    edge = ((value - constants.min_val).abs() <= value_error) | ((value - constants.max_val).abs() <= value_error)
    inside = (constants.min_val < value) & (value < constants.max_val)
    nearest = (z.abs() - z_error).clamp(0, 700)  # to 0 that z may be
    curvature = (2 * (2 + nearest) * torch.exp(-nearest)).clamp(max=MISH_CURVATURE)
    # For z > 0 torch's own mish' subtracts tanh^2 from 1.
    roundings = u * (20 - z.clamp(-150, 0) + 4 * z.clamp(0, 20)) * (tanh + (slope - tanh).abs()) + 1024 * rules.tiny
    size = (gy * constants.scale).abs() * (inside | edge)
    certain = size * roundings + 1024 * rules.tiny + edge * size * slope.abs()
    return torch.where(inside, gy * constants.scale * slope, 0.0), 1.1 * size, certain, size * curvature * z_error


# ---- drawing


class Draw:
    """Choices out of one source of integers: ``integers(least, most)``. The simple ones come first, towards which is shrunk."""

    def __init__(self, integers):
        self.integers = integers

    def pick(self, options):
        return options[self.integers(0, len(options) - 1)]

    def rarely(self, one_in):
        return self.integers(0, one_in - 1) == one_in - 1


# What each kernel is for, and half the time anything.
KINDS = ("any", "hopper", "any", "tiled", "any", "composite")


def draw_layer(draw: Draw, kind, device):
    """Geometry and channels, as of a case; what compiles a kernel."""
    if kind == "hopper":
        most = 8 if device == "cuda" else 4
        extra = draw.integers(0, 1), draw.integers(0, 1)
        channels = 8 * draw.integers(1, most), 8 * draw.integers(1, most)
        return dict(kernel=(3, 3), stride=(2, 2), padding=(1, 1), extra=extra), *channels
    axes = [_draw_axis(draw, 4 if kind == "composite" else 7) for _ in range(2)]
    geometry = dict(zip(("kernel", "stride", "padding", "extra"), zip(*axes)))
    if kind == "composite":
        return geometry, draw.integers(64, 300), draw.integers(1, 40)
    if kind == "tiled":
        return geometry, 2 * draw.integers(0, 9) + 1, 2 * draw.integers(0, 9) + 1
    return geometry, draw.integers(1, 20), draw.integers(1, 20)


def _draw_axis(draw, largest_kernel):
    stride, kernel = draw.integers(1, 4), draw.integers(1, largest_kernel)
    return kernel, stride, draw.integers(0, kernel), draw.integers(0, stride - 1)


def draw_size(draw: Draw, kind, geometry, device):
    """(batch, height, width)."""
    if kind == "hopper":
        on_cuda = device == "cuda"
        width = draw.pick((1, 2, 5, 31, 62, 63, 64, 65, 66, *(126, 127, 128, 129, 130)[: None if on_cuda else 3]))
        batch = draw.integers(0, 5 if on_cuda else 2)
        return batch, 128 if on_cuda and draw.rarely(20) else draw.integers(1, 6 if on_cuda else 3), width
    sizes = []
    for axis in zip(*(geometry[name] for name in ("kernel", "stride", "padding", "extra"))):
        kernel, stride, padding, extra = axis
        least = max(1, -((kernel + extra - 2 * padding - 1) // stride) + 1)
        sizes.append(draw.integers(least, least + {"any": 6, "tiled": 9, "composite": 4}[kind]))
    if kind != "composite" and draw.rarely(60) and device == "cpu":
        return 5, 128 // geometry["stride"][0], 128 // geometry["stride"][1]  # several chunks of images, if channels are many
    return draw.integers(0, 3), *sizes


def draw_case(draw: Draw, device, backend, layers=None) -> Case:
    """``layers``: the (kind, layer) to choose from, else any; ``backend``: the only one, else any."""
    if layers is None:
        kind = draw.pick(KINDS) if backend != "hopper" else "hopper"
        geometry, in_channels, out = draw_layer(draw, kind, device)
    else:
        kind, (geometry, in_channels, out) = draw.pick(layers)
    batch, height, width = draw_size(draw, kind, geometry, device)
    names = SERVING[device] if kind == "hopper" or draw.rarely(10) else SERVING[device][device == "cuda" :]
    forced = backend or draw.pick(("dispatch", *names) if draw.rarely(2) else ("dispatch",))
    others = draw.rarely(6) and forced in ("dispatch", "reference")
    dtype = draw.pick(CHOICES["dtype"][1:]) if others else "float32"
    bias = not draw.rarely(3)
    options = {} if dtype in ("float16", "bfloat16") else _draw_gradient(draw, bias)
    form = draw.pick(CHOICES["form"])
    precision = draw.pick(("fp32", "fp32", "flags") if forced == "tiled" else CHOICES["precision"])
    return Case(
        **geometry | options | _draw_values(draw, dtype, "gradient" in options),
        x=(1 if form == "unbatched" else batch, in_channels, height, width),
        out=out,
        bias=bias,
        add=draw.pick(ADD_VALUES),
        scale=draw.pick(SCALES),
        dtype=dtype,
        layout=draw.pick(CHOICES["layout"]) if draw.rarely(2) else "contiguous",
        weight_layout=draw.pick(CHOICES["weight_layout"]) if draw.rarely(3) else "contiguous",
        precision=precision,
        backend=forced,
        form=form,
        place=draw.pick(CHOICES["place"]) if device == "cuda" else "plain",
        device=device,
        seed=draw.integers(0, 2**31 - 1),
    )


def _draw_gradient(draw, bias):
    if not draw.rarely(4):
        return {}
    return {"gradient": draw.pick([letters for letters in GRADIENTS[1:] if bias or "b" not in letters])}


def _draw_values(draw, dtype, differentiated):
    """Scales and special values of the operands. Gradients are compared where nothing overflows, so theirs are tamer."""
    most = 3 if dtype == "float16" else 8 if differentiated else 30
    values = {}
    if draw.rarely(3):
        x = draw.integers(-most, most)
        opposite = max(-most, min(most, -x + draw.integers(-2, 2)))
        values["x_exponent"] = x
        values["weight_exponent"] = draw.integers(-most, most) if draw.rarely(2) else opposite
    for name in ("x_mix", "weight_mix"):
        if draw.rarely(6):
            values[name] = draw.pick(CHOICES[name])
    for name in ("x_special", "weight_special", "bias_special"):
        if draw.rarely(6):
            values[name] = draw.pick(FINITE if differentiated else SPECIAL)
    return values


# ---- the search


class Progress:
    """Counts, shown in one line that is written over on a terminal."""

    def __init__(self, stream):
        self.stream, self.start, self.shown = stream, time.monotonic(), 0.0
        self.served = collections.Counter()

    def line(self):
        cases, seconds = self.served.total(), time.monotonic() - self.start
        parts = ", ".join(f"{name} {count}" for name, count in self.served.most_common())
        return f"{cases} cases, {cases / max(seconds, 1e-9):.1f}/s: {parts}"

    def count(self, name):
        self.served[name] += 1
        terminal, now = self.stream.isatty(), time.monotonic()
        if now - self.shown >= 1 and now - self.start >= 1:
            self.shown = now
            self.stream.write(f"\r{self.line()}\033[K" if terminal else f"{self.line()}\n")
            self.stream.flush()

    def finish(self, text):
        self.stream.write(("\r\033[K" if self.stream.isatty() else "") + text + "\n")
        self.stream.flush()


class Search:
    """Runs drawn cases until ``minutes`` are over, or one is wrong: that is then shrunk, and ``failure`` is (case, error)."""

    def __init__(self, minutes, seed, device, backend, most_cases=None):
        self.end, self.seed, self.device, self.backend = time.monotonic() + 60 * minutes, seed, device, backend
        self.most_cases = most_cases or math.inf
        self.progress = Progress(sys.stdout)
        self.failed, self.failure, self.shrunk = {}, None, math.inf  # until when to shrink

    def over(self):
        return time.monotonic() >= self.end or self.progress.served.total() >= self.most_cases

    def run(self):
        layers, number = ([], 0) if self.device == "cuda" else (None, 0)
        before = -BUSY
        while not self.over() and self.failure is None:
            if layers is not None and self.progress.served.total() - before >= BUSY:
                kind = "hopper" if self.backend == "hopper" else KINDS[(len(layers) + 1) % len(KINDS)]
                source = random.Random(f"{self.seed} {len(layers)}")
                layers.append((kind, draw_layer(Draw(source.randint), kind, self.device)))
            before = self.progress.served.total()
            self._round(layers, self.seed * 2**20 + number)
            number += 1

    def _round(self, layers, seed):
        import hypothesis
        from hypothesis import strategies

        until = time.monotonic() + ROUND

        @hypothesis.seed(seed)
        @hypothesis.settings(
            **dict(max_examples=1000, deadline=None, database=None, report_multiple_bugs=False),
            phases=[hypothesis.Phase.generate, hypothesis.Phase.shrink],
            suppress_health_check=list(hypothesis.HealthCheck),
        )
        @hypothesis.given(strategies.data())
        def run_drawn(data):
            integers = lambda least, most: data.draw(strategies.integers(least, most))  # noqa: E731
            case = draw_case(Draw(integers), self.device, self.backend, layers)  # first, as hypothesis wants all data the same
            if not self.failed and (self.over() or time.monotonic() >= until):
                raise Over
            self._one(case)

        try:
            run_drawn()
        except Over:
            pass
        except Lost as error:
            self.failure = self.current, str(error)
        except Exception as error:
            if not self.failed:
                raise
            case, message = self.last
            again = "" if isinstance(error, Wrong) else " (at one run, and not at another)"
            self.failure = case, message + again

    def _one(self, case):
        self.current = case
        if time.monotonic() > self.shrunk:  # nothing new any more; hypothesis runs the simplest again
            if case not in self.failed:
                return
            message = self.failed[case]
        else:
            try:
                name = run_case(case)
                if not self.failed:
                    self.progress.count(name)
                return
            except Wrong as error:
                message = str(error)
        if not self.failed:
            self.shrunk = time.monotonic() + SHRINKING
        self.failed[case], self.last = message, (case, message)
        raise Wrong(message)


# ---- the command


def main(argv=None) -> int:
    """The exit status: 0 if nothing was wrong, 1 if a case was."""
    args = parse(argv)
    if args.case is not None:
        return rerun(args.case)
    search = Search(args.minutes, args.seed, args.device, args.backend, args.cases)
    search.run()
    search.progress.finish(f"{search.progress.line()}; seed {args.seed}, {args.device}")
    if search.failure is None:
        return 0
    case, message = search.failure
    print(f"numba_impl.fuzz: {message}", file=sys.stderr)
    print(f"python -m numba_impl.fuzz --case {shlex.quote(str(case))}", flush=True)
    return 1


def rerun(case) -> int:
    try:
        name = run_case(case)
    except (Wrong, Lost) as error:
        print(f"numba_impl.fuzz: {error}", file=sys.stderr)
        print(f"python -m numba_impl.fuzz --case {shlex.quote(str(case))}", flush=True)
        return 1
    print(f"right: {case}, {name}")
    return 0


def parse(argv):
    """The checked arguments; wrong ones end the program with a message."""
    parser = argparse.ArgumentParser("python -m numba_impl.fuzz", description="Compare drawn calls of the layer with float64.")
    add = parser.add_argument
    add("--minutes", type=float, default=1.0, help="how long; default: %(default)s")
    add("--cases", type=int, help="how many at most; default: as many as there is time for")
    add("--seed", type=int, help="of the calls; default: drawn, and printed")
    add("--device", choices=tuple(SERVING), default="cuda" if torch.cuda.is_available() else "cpu", help="default: %(default)s")
    add("--backend", choices=tuple(dispatch.BACKENDS), help="forced in every call; default: some, and dispatch's own choice")
    add("--case", metavar="CASE", help="run this alone, as a failure prints it")
    args = parser.parse_args(argv)
    if args.case is not None:
        try:
            args.case = parse_case(args.case)
        except (ValueError, TypeError) as error:
            parser.error(f"--case: {error}")
    device = args.device if args.case is None else args.case.device
    if device not in SERVING:
        parser.error(f"--case: device must be one of {tuple(SERVING)}, got {device!r}")
    if device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no CUDA device")
    if args.case is not None:
        return args
    if not 0 < args.minutes < math.inf:
        parser.error(f"--minutes must be positive, got {args.minutes}")
    if args.cases is not None and args.cases < 1:
        parser.error(f"--cases must be positive, got {args.cases}")
    if args.backend not in (None, *SERVING[device]):
        parser.error(f"--backend {args.backend} serves no call on {device}, only {', '.join(SERVING[device])} do")
    try:
        import hypothesis  # noqa: F401
    except ImportError:
        parser.error("hypothesis is missing, of the extra test: pip install '.[test]'")
    args.seed = random.randrange(2**31) if args.seed is None else args.seed
    return args


if __name__ == "__main__":
    sys.exit(main())
