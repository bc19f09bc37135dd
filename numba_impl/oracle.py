"""What float64 says of the layer, and how far from it a result may be: bounds derived from the arithmetic, not from what passes.

u = 2^-24 is half the spacing of fp32 at 1, T the most terms of a sum. Operands are independent and of either sign, as drawn
ones are; their scales may differ, and single ones may be NaN, infinite or below 2^-126.

*Convolution.* Summing T products rounds T partial sums, each by up to u of itself. The k-th partial sum is about
sqrt(k/T) * spread, where spread = sqrt(sum of the squared products). The error is then a random walk of 0.3 u sqrt(T) spread
(root mean square, measured), and a value in 10^6 reaches ten times that. So 8 u sqrt(T) spread bounds each value, and
u (sqrt(T) + 8) the L2 error of many, relative to the L2 size of what is summed: scale * (spread + |add_value|). Operands
rounded to TF32 (2^-11) add 2.8e-4 spread (root mean square), for which 4 * 2^-11 spread and 2^-11 are allowed.
Where sqrt(T) spread, which no sum of magnitudes exceeds, comes near fp32's range, a partial sum may overflow, and any result
within the clamp's bounds, or NaN, is right.

``reach`` says what else may decide on a sum, each with what the one before it says. "sum": nothing. "edge": a weight that is not
finite, times a zero beyond the image's edge. "pixel": the scale that a pixel's channels share; the error may be
4 u T max |x| max |w| instead, of the pixels that the sum meets and of the output channel. "image": transforms of whole images,
as cuDNN's (Winograd, FFT): the same of an image; they spread NaN and infinities, and may take operands below 2^-126 for 0.

*16 bits.* Operands are exact as they are (autocast's are to be cast before), sums and the epilogue are fp32's: a result is any
that rounding to its dtype makes of what would be right in fp32. ``between`` is the dtype to which the pre-activation was rounded
on its way to the epilogue, by torch's convolution; half a unit in its last place is one error more. A gradient adds up
pre-gradients that were rounded, independently, and is rounded itself; where either may overflow, any is right.

*Epilogue* (this and the next are of mish_add_hardtanh_scale alone; another has bounds of its own). It maps the interval
of the pre-activation, widened by its own rounding: |z| u of mish where z < 0, since the argument of exp2 is rounded, and 8 u;
4 u of add_value and of the result. Below 2^-126 a result may be flushed to zero.

*Its gradient.* mish'(z) = tanh(softplus(z)) + z * (its derivative): each summand loses |z| u relative where z < 0, and 16 u in
all the operations. |mish''(z)|, at most 0.65 and 2 (2 + |z|) exp(-|z|), carries an error of z on. On which side of the clamp z
lies, the fp32 forward decides; where it is not at hand, either side is right within z's error.

*Gradients of x, weight and bias* are sums over that gradient, bounded like the convolution's. The error of what they add up
counts in full where it is rounding or the clamp's choice, and in squares where it is the pre-activation's random error.
"""

import math
from typing import NamedTuple

import torch
from torch.nn.functional import mish, softplus

from numba_impl import convolution
from numba_impl.epilogue import MISH_ADD_HARDTANH_SCALE, Constants
from numba_impl.problem import Geometry

U, TF32_U = 2.0**-24, 2.0**-11
LEAST, LARGEST = 2.0**-126, torch.finfo(torch.float32).max
TINY = 1024 * LEAST
MISH_LOWEST, MISH_LEAST = -1.1924, -0.30885  # where mish has its minimum, and below it
MISH_SLOPE, MISH_CURVATURE = 1.09, 0.65
BARE = Constants(0.0, 1.0, -math.inf, math.inf)  # mish alone
REACHES = ("sum", "edge", "pixel", "image")
CHUNK = 2**25  # outputs compared at a time: float64 values and bounds of 5e8 need not fit together
MANY = 64  # from so many outputs on, their L2 error is a bounded multiple of its root mean square


class Wrong(AssertionError):
    """A result is further from float64 than rounding explains."""


class Errors(NamedTuple):
    """The largest error, and the L2 error of all values relative to the L2 size of float64's."""

    largest: float
    relative: float


class PreActivation(NamedTuple):
    """The pre-activation in float64, and what is known of a computed one."""

    value: torch.Tensor
    spread: torch.Tensor  # raised to what ``reach`` makes of it
    error: torch.Tensor
    unsure: torch.Tensor  # anything may be right
    maybe_nan: torch.Tensor  # NaN may be right, too

    @classmethod
    def of(cls, x, weight, bias, geometry: Geometry, precision="fp32", reach="sum", between=torch.float32) -> "PreActivation":
        """In ``precision``, "fp32" or "tf32". ``reach``: one of ``REACHES``."""
        x, weight, bias = (None if t is None else t.detach().double() for t in (x, weight, bias))
        sizes, weights, biases = (None if t is None else t.nan_to_num(0, 0, 0).abs() for t in (x, weight, bias))
        edge, pixel, image = (REACHES.index(reach) >= least for least in (1, 2, 3))
        terms = _terms(weight, bias, geometry)
        value = convolution.forward(x, weight, bias, geometry)
        squared_biases = None if bias is None else biases.square()
        spread = convolution.forward(sizes.square(), weights.square(), squared_biases, geometry).sqrt()
        if pixel:
            largest = sizes.amax((1, 2, 3) if image else 1, keepdim=True)
            met = largest if image else convolution.forward(largest, torch.ones_like(weight[:1, :1]), None, geometry)
            spread = torch.maximum(spread, 0.5 * terms**0.5 * met * weights.amax((0, 2, 3)).view(1, -1, 1, 1))
        error = 8 * U * terms**0.5 * spread + terms * LEAST + (4 * TF32_U * spread if precision == "tf32" else 0)
        if image:
            flushed, flushed_weights = (torch.where(t < LEAST, t, 0) for t in (sizes, weights))
            error = error + convolution.forward(flushed, weights, None, geometry)
            error = error + convolution.forward(sizes, flushed_weights, None, geometry)
        error = error + _half_unit(value, between)
        overflows = value.isfinite() & (value.abs() + error > torch.finfo(between).max)
        unsure = (terms**0.5 * spread > LARGEST / 4) | overflows
        maybe_nan = ~weight.isfinite().all(0).flatten(1).all(1).view(1, -1, 1, 1) & edge
        if image:
            unsure = unsure | maybe_nan | ~x.isfinite().flatten(1).all(1).view(-1, 1, 1, 1)
        return cls(value, spread, error, unsure, maybe_nan)


class PreGradient(NamedTuple):
    """The gradient at the pre-activation in float64, and what is known of a computed one."""

    value: torch.Tensor  # 0 at the clamp's bounds and beyond
    unclamped: torch.Tensor
    edge: torch.Tensor  # on which side of a bound the pre-activation lies, rounding decides
    slope: torch.Tensor  # mish'
    rounding: torch.Tensor  # the error of the operations
    carried: torch.Tensor  # the error that the pre-activation's causes

    @classmethod
    def of(cls, z, z_error, gy, constants: Constants) -> "PreGradient":
        """At ``z`` in float64, known within ``z_error``, from ``gy``."""
        constants, gy = _in_fp32(constants), gy.double()
        gradient = MISH_ADD_HARDTANH_SCALE.gradient
        slope, tanh, bare = gradient(z, torch.ones_like(z), BARE), torch.tanh(softplus(z)), mish(z)
        lost = -z.clamp(-150, 0)
        output = bare + constants.add_value
        output_error = U * (8 + lost) * bare.abs() + 4 * U * (abs(constants.add_value) + output.abs()) + TINY
        output_error = output_error + MISH_SLOPE * z_error
        edge = ((output - constants.min_val).abs() <= output_error) | ((output - constants.max_val).abs() <= output_error)
        edge = edge & z.isfinite()
        unclamped = gradient(z, gy, constants._replace(min_val=-math.inf, max_val=math.inf))
        value = gradient(z, gy, constants)
        nearest = (z.abs() - z_error).clamp(0, 700)  # to 0 that z may be
        curvature = (2 * (2 + nearest) * torch.exp(-nearest)).clamp(max=MISH_CURVATURE)
        size = (gy * constants.scale).abs()
        rounding = size * (U * (16 + lost) * (tanh + (slope - tanh).abs()) + TINY)
        rounding = rounding + 4 * U * torch.where(edge, unclamped, value).abs() + TINY
        return cls(value, unclamped, edge, slope, rounding, size * curvature * z_error)


def check_layer(
    y, x, weight, bias, geometry: Geometry, constants: Constants, precision="fp32", reach="sum", between=torch.float32
) -> Errors:
    """Raises Wrong unless ``y`` [N, C_out, H_out, W_out] is the fused layer's result: value by value, and in L2.

    x [N, C_in, H, W], weight [C_in, C_out, KH, KW], bias [C_out] or None, all of one dtype, fp32, bf16 or fp16, which is y's;
    NaN and infinities must be float64's. ``precision="tf32"`` allows for operands rounded to 10 bits; ``reach``: one of
    ``REACHES``; ``between``: the dtype of the pre-activation.
    """
    y, x, weight, bias = _where_a_nan_stays(y, x, weight, bias)
    _require_like(y, _output_shape(x, weight, geometry), x.dtype)
    totals = _Totals()
    for part in _parts(y):
        pre = PreActivation.of(x[part], weight, bias, geometry, precision, reach, between)
        totals.add(*_compare(y[part], pre, constants))
    totals.require(_terms(weight, bias, geometry), precision, constants.scale, y.dtype, between)
    return totals.errors


def check_epilogue(y, z, constants: Constants) -> Errors:
    """Raises Wrong unless ``y`` is the epilogue of ``z``, of one dtype that ``check_layer`` takes, value by value; any shape."""
    _require_like(y, z.shape, z.dtype)
    y, z, totals = y.detach().reshape(-1), z.detach().reshape(-1), _Totals()
    for part in _parts(z):
        value = z[part].double()
        none = torch.zeros_like(value)
        totals.add(*_compare(y[part], PreActivation(value, none, none, none > 0, none > 0), constants))
    return totals.errors


def check_layer_gradient(
    g, x, weight, bias, gy, geometry: Geometry, constants: Constants, precision="fp32", reach="sum", between=torch.float32
):
    """Raises Wrong unless ``g`` is the gradient at the fused layer's pre-activation from ``gy``: value by value, and in L2.

    Operands as for ``check_layer``; ``gy`` finite or NaN. Exactly 0 at the clamp's bounds and beyond; where rounding may
    put the pre-activation on either side of a bound, 0 or the gradient. NaN where the pre-activation is not finite.
    """
    g, gy, x, weight, bias = _where_a_nan_stays(g, gy, x, weight, bias)
    _require_like(g, _output_shape(x, weight, geometry), x.dtype)
    totals = _Totals()
    for part in _parts(g):
        pre = PreActivation.of(x[part], weight, bias, geometry, precision, reach, between)
        right = PreGradient.of(pre.value, pre.error, gy[part], constants)
        want = torch.where(right.edge & (g[part] != 0), right.unclamped, right.value.masked_fill(right.edge, 0))
        want = want.masked_fill(~pre.value.isfinite(), math.nan)
        zero = (gy[part] == 0) | ((right.value == 0) & (right.unclamped != 0) & ~right.edge)
        # gy's zero, or the clamp's, is exact; that of mish' of a large pre-activation need not be.
        bound = (right.rounding + right.carried + _half_unit(want.nan_to_num(0), g.dtype)).masked_fill(zero, 0)
        difference = g[part].detach().double() - want
        good = torch.where(want.isfinite(), difference.abs() <= bound, want.isnan() & g[part].isnan())
        _require(good, g[part], want, bound, {"pre-activation": pre.value, "gy": gy[part]})
        carried = (gy[part].double() * constants.scale * (1 + pre.spread)).masked_fill(~pre.value.isfinite(), 0)
        totals.add(difference.nan_to_num(0), want.nan_to_num(0), carried.nan_to_num(0))
    totals.require(_terms(weight, bias, geometry), precision, constants.scale, g.dtype, between)


def check_epilogue_gradient(g, z, gy, clamped, constants: Constants):
    """Raises Wrong unless ``g`` is the epilogue's gradient at ``z`` from ``gy``, all of one dtype, value by value; any shape.

    ``clamped`` is the forward's fp32 result at ``z`` with scale 1: where it stands at a bound the gradient is exactly 0.
    NaN and infinities must be float64's, but 0 times infinity may be NaN where mish' is below fp32.
    """
    for t, dtype in ((g, z.dtype), (gy, z.dtype), (clamped, torch.float32)):
        _require_like(t, z.shape, dtype)
    _, _, low, high = _in_fp32(constants)
    outside = (clamped <= low) | (clamped >= high)
    right = PreGradient.of(z.double(), torch.zeros_like(z, dtype=torch.float64), gy, constants)
    want = torch.where(right.edge, right.unclamped.masked_fill(outside, 0), right.value)
    want = want.masked_fill(outside & z.isfinite(), 0)
    bound = (right.rounding + _half_unit(want, g.dtype)).nan_to_num(0).masked_fill(outside, 0)
    same = torch.where(want.isfinite(), (g - want).abs() <= bound, (g == want) | (g.isnan() & want.isnan()))
    good = same | (g.isnan() & want.isinf() & (right.slope.abs() < TINY))
    _require(good, g, want, bound, {"z": z, "gy": gy, "clamped": clamped})


class Gradients(NamedTuple):
    """The layer's gradients of (x, weight, bias) in float64, and how far from them computed ones may be."""

    values: tuple[torch.Tensor, ...]
    errors: tuple[torch.Tensor, ...]  # not finite where anything may be right

    @classmethod
    def of(
        cls, x, weight, bias, gy, geometry: Geometry, constants: Constants, precision="fp32", reach="sum", between=torch.float32
    ) -> "Gradients":
        """From ``gy``; operands as for ``check_layer``, but finite. ``precision`` is the forward's and the convolutions'."""
        parts = [_summed(x[part], weight, bias, gy[part], geometry, constants, precision, reach, between) for part in _parts(gy)]
        of_x, of_weight, of_bias, largest = zip(*parts)
        # On a GPU torch's convolutions are cuDNN's, which may transform images.
        beside_x, beside_weight = (_largest(t) * max(largest) if gy.is_cuda else 0 for t in (weight, x))
        bounds = (
            _bound([torch.cat(of) for of in zip(*of_x)], weight[0].numel(), precision, beside_x, x.dtype),
            _bound([sum(of) for of in zip(*of_weight)], x[:, 0].numel(), precision, beside_weight, x.dtype),
            _bound([sum(of) for of in zip(*of_bias)], gy[:, 0].numel(), "fp32", 0, x.dtype),
        )
        return cls(*zip(*bounds))

    def check(self, gradients) -> Errors:
        """Raises Wrong unless (of x, of weight, of bias), None where not asked for, are these; the worst errors of any.

        They are of any dtype, which a leaf may have that autocast casts.
        """
        found = [Errors(0.0, 0.0)]
        for name, got, want, error in zip(("x", "weight", "bias"), gradients, self.values, self.errors):
            if got is not None:
                _require_like(got, want.shape, got.dtype)
                difference, bound = (got.double() - want).abs(), error + _half_unit(want, got.dtype)
                anything = ~bound.isfinite() | (want.abs() + bound > torch.finfo(got.dtype).max)
                _require((difference <= bound) | anything, got, want, bound, {}, f" of the gradient of {name}")
                found.append(Errors(_largest(difference), (difference.norm() / want.norm()).item() if want.any() else 0.0))
        return Errors(*map(max, zip(*found)))


def clear_of_edges(gy, x, weight, bias, geometry: Geometry, constants: Constants, precision="fp32", between=torch.float32):
    """``gy`` with 0 where rounding decides on which side of the clamp a pre-activation lies, so that either is right."""
    cleared = gy.clone()
    for part in _parts(gy):
        pre = PreActivation.of(x[part], weight, bias, geometry, precision, between=between)
        cleared[part].masked_fill_(PreGradient.of(pre.value, pre.error, gy[part], constants).edge, 0)
    return cleared


def pre_activation(x, weight, bias, geometry: Geometry):
    """In float64: the convolution, and its spread: the root of the sum of the squared terms of each output."""
    return PreActivation.of(x, weight, bias, geometry)[:2]


def to_tf32(t):
    """fp32 rounded to 10 mantissa bits, to nearest even, as TF32 takes its operands."""
    bits = t.contiguous().view(torch.int32)
    return ((bits + 0xFFF + (bits >> 13 & 1)) & ~0x1FFF).view(torch.float32)


class _Totals:
    """What the checks of parts come to together."""

    def __init__(self):
        self.largest, self.count, self.sums = 0.0, 0, torch.zeros(4, dtype=torch.float64)

    def add(self, difference, want, summed):
        """The errors of a part, float64's values and the size of what was added up for each; 0 where nothing is compared."""
        self.largest = max(self.largest, _largest(difference))
        self.count += difference.numel()
        powers = (difference, 2), (want, 2), (summed, 2), (summed, 4)
        self.sums += torch.stack([t.pow(power).sum() for t, power in powers]).cpu()

    @property
    def errors(self) -> Errors:
        wrong, size, _, _ = self.sums.sqrt().tolist()
        return Errors(self.largest, wrong / size if size else 0.0)

    def require(self, terms, precision, scale, dtype=torch.float32, between=torch.float32):
        """Raises Wrong unless the L2 error is as small as independent roundings make it, if no few values decide."""
        wrong, _, size, fourth = self.sums.tolist()
        if math.isfinite(fourth) and size >= math.sqrt(MANY * fourth):
            wrong, size = math.sqrt(wrong), math.sqrt(size)
            limit = U * (terms**0.5 + 8) + (TF32_U if precision == "tf32" else 0) + _roundoff(dtype) + 2 * _roundoff(between)
            if not wrong <= limit * size + (TINY * max(1.0, abs(scale)) + _least(dtype)) * self.count**0.5:
                raise Wrong(f"relative L2 error {wrong / size:.3g}, allowed {limit:.3g}")


def _compare(y, pre: PreActivation, constants):
    """What ``_Totals.add`` takes. Raises Wrong unless each value lies within what its pre-activation's interval gives."""
    dtype = y.dtype
    constants, y = _in_fp32(constants), y.detach().double()
    want = MISH_ADD_HARDTANH_SCALE.forward(pre.value, constants)
    low, high = _range(pre.value, pre.error.masked_fill(~pre.value.isfinite(), 0), constants)
    low, high = (t.to(torch.float32).to(dtype).double() for t in (low, high))  # rounding keeps their order
    good = torch.where(want.isnan(), y.isnan(), (low <= y) & (y <= high)) | (pre.maybe_nan & y.isnan())
    widest = max(abs(constants.min_val), abs(constants.max_val)) * abs(constants.scale) * (1 + 4 * U + _roundoff(dtype)) + LEAST
    possible = y.isnan() | (y.abs() <= (widest if widest < LARGEST else math.inf))
    _require(torch.where(pre.unsure, possible, good), y, want, high - low, {"pre-activation": pre.value})
    compared = (want.abs() <= LARGEST) & y.isfinite() & ~pre.unsure
    summed = abs(constants.scale) * (pre.spread + abs(constants.add_value))
    return (torch.where(compared, t, 0) for t in (y - want, want, summed))


def _range(z, z_error, constants):
    """(least, largest) fp32 output of pre-activations within ``z_error`` of ``z``."""
    add_value, scale, min_val, max_val = constants
    first, last = z - z_error, z + z_error
    ends = mish(first), mish(last)
    least = torch.minimum(*ends).masked_fill((first < MISH_LOWEST + 1e-4) & (last > MISH_LOWEST - 1e-4), MISH_LEAST)
    most = torch.maximum(*ends)
    size = torch.maximum(least.abs(), most.abs()).clamp(max=max(abs(min_val), abs(max_val)) + abs(add_value))  # beyond: clamped
    rounding = U * (8 - first.clamp(-150, 0)) * size + 4 * U * abs(add_value) + TINY
    rounding = rounding.masked_fill(z.isinf(), 0)
    bounds = [(value + add_value).clamp(min_val, max_val) * scale for value in (least - rounding, most + rounding)]
    low, high = torch.minimum(*bounds), torch.maximum(*bounds)
    low, high = low * (1 - 4 * U * low.sign()) - LEAST, high * (1 + 4 * U * high.sign()) + LEAST
    return _least_fp32(low), -_least_fp32(-high)


def _least_fp32(t):
    """What bounds fp32 values from below where float64 ``t`` bounds the exact ones: these overflow."""
    beyond = torch.where(t > LARGEST * (1 + 4 * U), math.inf, t.clamp(max=LARGEST))
    return beyond.masked_fill(t < -LARGEST * (1 - 4 * U), -math.inf)


def _summed(x, weight, bias, gy, geometry, constants, precision, reach, between):
    """Of some images, for each of x, weight and bias: its gradient, the errors to be added in full and in squares, and what
    its spread is the root of; and the largest gradient at the pre-activation."""
    pre = PreActivation.of(x, weight, bias, geometry, precision, reach, between)
    right = PreGradient.of(pre.value, pre.error, gy, constants)
    carried = right.carried + 3 * _half_unit(right.value, gy.dtype)  # five times the root mean square, three times the most
    passed = (right.value != 0) | right.edge
    largest = min(LARGEST / 4, torch.finfo(gy.dtype).max / MISH_SLOPE)
    fits = pre.value.isfinite() & ~pre.unsure & ~(passed & ((gy.double() * constants.scale).abs() >= largest))
    error = torch.where(passed, right.rounding + right.edge * right.unclamped.abs(), 0)
    error = torch.where(fits.all(), error, math.inf)
    x, weight = x.detach().double(), weight.detach().double()
    products = (
        (right.value, x, weight),
        (error, x.abs(), weight.abs()),
        (carried.square() * passed, x.square(), weight.square()),
        (right.value.square(), x.square(), weight.square()),
    )
    sums = [(*convolution.gradients(*factors, geometry, True, True), factors[0].sum((0, 2, 3))) for factors in products]
    return *zip(*sums), _largest(right.value)


def _bound(sums, terms, precision, largest, dtype):
    """(value, error) of a gradient from its ``_summed``; ``largest``: of the products that image transforms mix, or 0."""
    value, certain, squared, spread = *sums[:3], sums[3].sqrt()
    error = 8 * U * terms**0.5 * spread + (4 * TF32_U * spread if precision == "tf32" else 0)
    error = error.clamp(min=4 * U * terms * largest)
    error = error + certain + squared.sqrt() + 4 * U * value.abs() + (1 + terms) * LEAST + _half_unit(value, dtype)
    beyond = (terms**0.5 * spread + certain > LARGEST / 4) | (value.abs() + error > torch.finfo(dtype).max)
    return value, error.masked_fill(beyond, math.inf)


def _require(good, got, want, bound, others, of=""):
    """Raises Wrong unless all are good: it shows the first that is not, and what others hold there."""
    if not good.all():
        places = good.logical_not().nonzero()
        at = tuple(places[0].tolist())
        context = "".join(f", {name} {t[at].item()!r}" for name, t in others.items())
        raise Wrong(
            f"{len(places)} of {good.numel()} values{of} wrong; the first at {at}: got {got[at].item()!r}, "
            f"want {want[at].item()!r} within {bound[at].item():.3g}{context}"
        )


def _require_like(t, shape, dtype):
    if t.shape != shape or t.dtype != dtype:
        raise Wrong(f"a result of shape {tuple(t.shape)} and {t.dtype}, not of {tuple(shape)} and {dtype}")


def _roundoff(dtype):
    """The relative error of rounding to a dtype of 16 bits; fp32's is counted elsewhere."""
    return 0.0 if dtype == torch.float32 else torch.finfo(dtype).eps / 2


def _least(dtype):
    """The spacing of a 16-bit dtype's denormals."""
    return 0.0 if dtype == torch.float32 else torch.finfo(dtype).tiny * torch.finfo(dtype).eps


def _half_unit(t, dtype):
    """Half a unit in the last place, at least, of a dtype of 16 bits at float64 ``t``."""
    return t.abs() * _roundoff(dtype) + _least(dtype)


def _parts(t):
    """Slices of a few images, or of a flat tensor; at least one."""
    images = max(1, CHUNK // max(1, t[:1].numel()))
    return [slice(first, first + images) for first in range(0, max(1, len(t)), images)]


def _where_a_nan_stays(*tensors):
    """The same; on the CPU if any is not finite, since on a GPU a NaN may spread over an image."""
    special = any(t is not None and not t.isfinite().all() for t in tensors)
    return [t if t is None or not special else t.cpu() for t in tensors]


def _terms(weight, bias, geometry):
    """The most terms that any output adds up."""
    taps = math.prod(max(map(axis.parities.count, axis.parities)) for axis in (geometry.rows, geometry.cols))
    return weight.shape[0] * taps + (bias is not None)


def _output_shape(x, weight, geometry):
    """By torch's own rule."""
    return convolution.forward(*(t.detach().to("meta") for t in (x, weight)), None, geometry).shape


def _largest(t):
    return t.detach().abs().amax().item() if t.numel() else 0.0


def _in_fp32(constants):
    return Constants(*torch.tensor(constants, dtype=torch.float32).tolist())
