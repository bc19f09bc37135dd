"""How far from float64 a result may be: bounds derived from the arithmetic, not from what passes.

*Convolution.* Summing T products in fp32 rounds T partial sums, each by up to u = 2^-24 of itself.
For independent products of either sign the k-th partial sum is about sqrt(k/T) * spread, where
spread = sqrt(sum of the squared products). The error is then a random walk of 0.3 * u * sqrt(T) *
spread (root mean square, measured), and a value in 10^6 reaches ten times that. So 8 * u * sqrt(T) *
spread bounds each value, and u * (sqrt(T) + 8) the L2 error of all, relative to the L2 size of what is
summed: scale * (spread + |add_value|). Operands rounded to TF32 or fp16 (2^-11) are off by 2.8e-4 *
spread (root mean square), 50 times the bound at 144 terms.

*Epilogue.* mish'(v) <= 1.09 and hardtanh' <= 1 carry the convolution's error on. exp(v) loses |v| * u
relative where v < 0 (the argument of exp2 is rounded), a handful of operations a few u each. Below
2^-126 a result may be flushed to zero.

*Gradient.* mish'(v) = tanh(softplus(v)) + v * (its derivative): each summand loses |v| * u relative where
v < 0, and 16 u in all the operations. |mish''(v)|, at most 0.65 and 2 (2 + |v|) exp(-|v|), carries an error of v on.
Which side of the clamp v lies on, the fp32 forward decides; where it is not at hand, either side within v's error.
"""

import torch

from numba_impl.backends import reference
from numba_impl.problem import Constants, Geometry

U = 2.0**-24
TF32_U = 2.0**-11
MISH_SLOPE, MISH_CURVATURE = 1.09, 0.65
TINY = 1024 * 2.0**-126
BARE = Constants(0.0, 1.0, float("-inf"), float("inf"))  # mish alone
CHUNK = 2**26  # outputs compared at a time: the benchmark's 5e8 float64 values and bounds need not fit together


def check_layer(y, x, weight, bias, geometry: Geometry, constants: Constants, precision="fp32"):
    """Assert that ``y`` is the fused layer's result: value by value, and in L2 over all values.

    The operands must be independent and of either sign, as drawn ones are. NaN and infinities must be
    float64's. ``precision="tf32"`` allows for operands rounded to 10 bits.
    """
    terms = largest_sum(weight, bias, geometry)
    assert y.shape == output_shape(x, weight, geometry) and y.dtype == torch.float32
    step = max(1, CHUNK // max(1, y[:1].numel()))
    squares = torch.zeros(2, dtype=torch.float64)
    for part in range(0, len(x), step):
        xs, ys = x[part : part + step], y[part : part + step]
        pre, spread = pre_activation(xs, weight, bias, geometry)
        error = _pre_error(spread, terms, precision)
        summed = constants.scale * (spread.masked_fill(~pre.isfinite(), 0) + abs(constants.add_value))
        squared_errors = _check(ys, pre, error, constants).square().sum()
        squares += torch.stack([squared_errors, summed.square().sum()]).cpu()
    wrong, size = squares.sqrt().tolist()
    _check_l2(wrong, size, terms, precision)


def check_layer_gradient(g, x, weight, bias, gy, geometry: Geometry, constants: Constants, precision="fp32"):
    """Assert that ``g`` is the gradient at the fused layer's pre-activation from ``gy``: value by value, and in L2.

    Operands as for ``check_layer``; ``gy`` finite or NaN. Exactly 0 at the clamp's bounds and beyond; where rounding may
    put the pre-activation on either side of a bound, 0 or the gradient. NaN where the pre-activation is not finite.
    """
    terms = largest_sum(weight, bias, geometry)
    assert g.shape == gy.shape == output_shape(x, weight, geometry) and g.dtype == torch.float32
    step = max(1, CHUNK // max(1, g[:1].numel()))
    squares = torch.zeros(2, dtype=torch.float64)
    for part in range(0, len(x), step):
        xs, gs, gys = (t[part : part + step] for t in (x, g, gy))
        pre, spread = pre_activation(xs, weight, bias, geometry)
        squared_errors = _check_gradient(gs, pre, _pre_error(spread, terms, precision), gys, constants).square().sum()
        carried = (gys.double() * constants.scale * (1 + spread)).masked_fill(~pre.isfinite() | gys.isnan(), 0)
        squares += torch.stack([squared_errors, carried.square().sum()]).cpu()
    _check_l2(*squares.sqrt().tolist(), terms, precision)


def check_epilogue(y, v, constants: Constants):
    """Assert that ``y`` is the epilogue of ``v`` in fp32, value by value; any shape."""
    assert y.shape == v.shape and y.dtype == torch.float32
    flat_y, flat_v = y.detach().reshape(-1), v.detach().reshape(-1)
    for part in range(0, v.numel(), CHUNK):
        v64 = flat_v[part : part + CHUNK].double()
        _check(flat_y[part : part + CHUNK], v64, torch.zeros_like(v64), constants)


def check_epilogue_gradient(g, z, gy, clamped, constants: Constants):
    """Assert that ``g`` is the epilogue's gradient at fp32 ``z`` from ``gy``, value by value; any shape.

    ``clamped`` is the forward's result at ``z`` with scale 1: where it stands at a bound the gradient is exactly 0.
    NaN and infinities must be float64's, but 0 times infinity may be NaN where mish' is below fp32.
    """
    assert g.shape == z.shape == gy.shape == clamped.shape and g.dtype == torch.float32
    low, high = (torch.tensor(bound, dtype=torch.float32).item() for bound in (constants.min_val, constants.max_val))
    outside = (clamped <= low) | (clamped >= high)
    assert (g[outside & z.isfinite()] == 0).all(), "a gradient where the output is at the clamp's bound"

    z64, gy64 = z.double(), gy.double()
    inside, unclamped, edge, bound, slope = _float64_gradient(z64, torch.zeros_like(z64), gy64, constants)
    want = torch.where(edge, unclamped.masked_fill(outside, 0), inside)
    same = torch.where(want.isfinite(), (g - want).abs() <= bound.nan_to_num(0), (g == want) | (g.isnan() & want.isnan()))
    good = same | (g.isnan() & want.isinf() & (slope.abs() < TINY))
    first = {name: t[~good][:5].tolist() for name, t in {"z": z, "gy": gy, "got": g, "want": want}.items()}
    assert good.all(), f"{(~good).sum()} of {good.numel()} values wrong; the first: {first}"


def pre_activation(x, weight, bias, geometry):
    """In float64: the convolution, and its spread: the root of the sum of the squared terms of each output."""
    x, weight, bias = (None if t is None else t.detach().double() for t in (x, weight, bias))
    pre = reference.conv_transpose2d(x, weight, bias, geometry)
    squared_bias = None if bias is None else bias.square()
    return pre, reference.conv_transpose2d(x.square(), weight.square(), squared_bias, geometry).sqrt()


def largest_sum(weight, bias, geometry):
    """The most terms that any output adds up."""
    taps = 1
    for axis in (geometry.rows, geometry.cols):
        taps *= max(axis.parities.count(parity) for parity in axis.parities)
    return weight.shape[0] * taps + (bias is not None)


def output_shape(x, weight, geometry):
    """Of a batched ``x``, by torch's own rule."""
    meta = (t.detach().to("meta") for t in (x, weight))
    return reference.conv_transpose2d(*meta, None, geometry).shape


def to_tf32(t):
    """fp32 rounded to 10 mantissa bits, to nearest even, as TF32 takes its operands."""
    bits = t.contiguous().view(torch.int32)
    return ((bits + 0xFFF + (bits >> 13 & 1)) & ~0x1FFF).view(torch.float32)


def _pre_error(spread, terms, precision):
    """How far each pre-activation may be from float64's."""
    return 8 * U * terms**0.5 * spread + (4 * TF32_U * spread if precision == "tf32" else 0)


def _check_l2(wrong, size, terms, precision):
    limit = U * (terms**0.5 + 8) + (TF32_U if precision == "tf32" else 0)
    assert wrong <= limit * size + TINY, f"relative L2 error {wrong / size:.3g}, allowed {limit:.3g}"


def _check(y, pre, pre_error, constants):
    """Assert that each value of one chunk is within its bound; gives the errors."""
    mish = torch.nn.functional.mish(pre)
    want = reference.mish_add_hardtanh_scale(pre, constants)
    bound = _epilogue_bound(pre, mish, want, pre_error, constants)
    want = torch.where(want.abs() > torch.finfo(torch.float32).max, want.sign() * float("inf"), want)
    difference = y.detach().double() - want
    special = ~want.isfinite()
    good = torch.where(special, (y == want) | (y.isnan() & want.isnan()), difference.abs() <= bound)
    _require(good, y, want, bound, {"pre-activation": pre})
    return torch.where(special, 0.0, difference)


def _require(good, got, want, bound, others):
    """Raise AssertionError unless all are good: it shows the first that is not, and what others hold there."""
    if not good.all():
        bad = good.logical_not().nonzero()
        at = tuple(bad[0].tolist())
        context = ", ".join(f"{name} {t[at].item()!r}" for name, t in others.items())
        raise AssertionError(
            f"{len(bad)} of {good.numel()} values wrong; the first at {at}: got {got[at].item()!r}, want {want[at].item()!r} "
            f"within {bound[at].item():.3g} ({context})"
        )


def _epilogue_bound(pre, mish, want, pre_error, constants):
    scale = abs(constants.scale)
    pre_error = pre_error.masked_fill(pre.isinf(), 0)  # infinity is exact
    # Past this, mish is clamped whatever its error.
    limit = max(abs(constants.min_val), abs(constants.max_val)) + abs(constants.add_value)
    rounding = U * (8 - pre.clamp(-150, 0)) * mish.abs().clamp(max=limit) + 4 * U * abs(constants.add_value)
    return (MISH_SLOPE * pre_error + rounding + TINY) * scale + 4 * U * want.abs()


def _check_gradient(g, pre, pre_error, gy, constants):
    """Assert that each gradient of one chunk is within its bound; gives the errors."""
    inside, unclamped, edge, bound, _ = _float64_gradient(pre, pre_error, gy.double(), constants)
    want = torch.where(edge & (g != 0), unclamped, inside.masked_fill(edge, 0))
    want = want.masked_fill(~pre.isfinite(), float("nan"))
    zero = (gy == 0) | ((inside == 0) & (unclamped != 0) & ~edge)
    bound = bound.masked_fill(zero, 0)  # gy's, or the clamp's; mish' of a large pre-activation need not be
    difference = g.detach().double() - want
    good = torch.where(want.isfinite(), difference.abs() <= bound, want.isnan() & g.isnan())
    _require(good, g, want, bound, {"pre-activation": pre, "gy": gy})
    return torch.where(want.isfinite(), difference, 0.0)


def _float64_gradient(z, z_error, gy, constants):
    """What decides on a gradient at ``z``, known within ``z_error``, from ``gy``; all in float64.

    (the gradient, the same without a clamp, where z may lie on either side of a bound, the error allowed, mish').
    """
    low, high = (torch.tensor(bound, dtype=torch.float32).item() for bound in (constants.min_val, constants.max_val))
    mish, slope = torch.nn.functional.mish(z), _gradient(z, torch.ones_like(z), BARE)
    tanh = torch.tanh(torch.nn.functional.softplus(z))
    value = mish + constants.add_value
    nearest = (z.abs() - z_error).clamp(0, 700)  # to 0 that z may be
    curvature = (2 * (2 + nearest) * torch.exp(-nearest)).clamp(max=MISH_CURVATURE)
    slope_error = U * (16 - z.clamp(-150, 0)) * (tanh + (slope - tanh).abs()) + curvature * z_error + TINY
    value_error = U * (8 - z.clamp(-150, 0)) * mish.abs() + 4 * U * (abs(constants.add_value) + value.abs()) + TINY
    value_error = value_error + MISH_SLOPE * z_error
    edge = (((value - low).abs() <= value_error) | ((value - high).abs() <= value_error)) & z.isfinite()
    unclamped = _gradient(z, gy, constants._replace(min_val=float("-inf"), max_val=float("inf")))
    inside = _gradient(z, gy, constants)
    bound = (gy * constants.scale).abs() * slope_error + 4 * U * torch.where(edge, unclamped, inside).abs() + TINY
    return inside, unclamped, edge, bound, slope


def _gradient(z, gy, constants):
    """By autograd, at any dtype."""
    leaf = z.detach().clone().requires_grad_()
    with torch.enable_grad():
        return torch.autograd.grad(reference.mish_add_hardtanh_scale(leaf, constants), leaf, gy)[0]
