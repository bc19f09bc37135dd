"""How far from float64 a result may be; u is half the spacing of the result's dtype at 1, T the most terms of a sum:

*Pre-activation.* T products of either sign, summed in any order, are off by a random walk of 0.3 u sqrt(T) spread (root
mean square), where spread = sqrt(sum of the squared products): 8 u sqrt(T) spread bounds each value, which is 27 times
that. TF32, of which the tiled kernel makes no use, adds 4 * 2^-11 spread, underflow T times the smallest normal number.
The tensor-core kernel scales the pixels' largest |x|, and cuDNN may transform whole images (Winograd, FFT): theirs may be
off by 4 u T max |x| max |w| instead, over a pixel or an image, and over an output channel.

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

import math
from typing import NamedTuple

import torch
from torch import nn

from numba_impl.backends import reference
from numba_impl.fuzz.case import precision_of
from numba_impl.problem import Constants, resolve_precision

MISH_SLOPE_ZERO, MISH_LEAST, MISH_CURVATURE = -1.1924, -0.30885, 0.65
TF32_U = 2.0**-11
MANY = 64  # outputs, from which on an L2 error is a bounded multiple of its root mean square


class Wrong(Exception):
    """A call whose result is not float64's, or that raised."""


def demand(condition, message):
    if not condition:
        raise Wrong(message)


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
    tf32: float  # error of a product of the pre-activation
    gradients_tf32: float  # and of the gradients', which are torch's convolutions
    cudnn: bool
    constants: Constants

    @classmethod
    def of(cls, case, name):
        info = torch.finfo(getattr(torch, case.dtype))
        cudnn = case.device == "cuda" and name in ("composite", "reference")
        permitted = case.device == "cuda" and case.dtype == "float32"
        permitted = permitted and resolve_precision(precision_of(case), torch.device("cuda")) == "tf32"
        tf32 = 4 * TF32_U if permitted else 0.0
        tiny = info.smallest_normal if case.dtype != "float16" else 2.0**-24  # its denormals are never flushed
        kept = torch.float64 if case.dtype == "float64" else torch.float32  # of the constants
        constants = Constants(*(torch.tensor(value, dtype=kept).item() for value in Constants.of(case.add, case.scale)))
        return cls(info.eps / 2, tiny, info.max, 0.0 if name == "tiled" else tf32, tf32, cudnn, constants)


def check(case, name, tensors, y, gradients):
    """Raises Wrong unless the result and the gradients are float64's, within what rounding allows."""
    x, rules = tensors["x"], Rules.of(case, name)
    demand(y.shape == case.output_shape, f"the result's shape is {tuple(y.shape)}, not {case.output_shape}")
    demand(y.dtype == x.dtype and y.device == x.device, f"the result is {y.dtype} on {y.device}")
    if not all(tensor.isfinite().all() for tensor in tensors.values()):  # whose places cuDNN's float64 would spread
        tensors, y = {name: tensor.cpu() for name, tensor in tensors.items()}, y.cpu()
    wide = {name: tensor.detach().double() for name, tensor in tensors.items()}
    truth = truth_of(case, name, rules, wide)
    check_output(case, rules, truth, y.double())
    for letter, gradient in zip(case.gradient, gradients):
        operand = wide[dict(x="x", w="weight", b="bias")[letter]]
        demand(gradient.shape == operand.shape, f"the shape of the gradient of {letter} is {tuple(gradient.shape)}")
        demand(gradient.dtype == x.dtype, f"the gradient of {letter} is {gradient.dtype}")
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
    demand(wrong <= limit * size + floor, f"relative L2 error {wrong / size:.3g}, allowed {limit:.3g}")


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
    tf32 = 4 * TF32_U if by_flags else rules.gradients_tf32
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
