"""The scalar maths after the convolution and its gradient, written once for every target."""

import numpy as np

LOG2E = np.float32(1.4426950408889634)
ONE, TWO, FOUR = map(np.float32, (1, 2, 4))
# From here on tanh(softplus(v)) rounds to 1; it also keeps e * (e + 2) finite.
SATURATED = np.float32(20)


def build(jit, exp2, reciprocal, minimum, maximum):
    """``mish_add_hardtanh_scale(v, add_value, scale, low, high)`` of one fp32 pre-activation, compiled by ``jit``.

    The other arguments are the target's operations on fp32; ``minimum`` and ``maximum`` keep NaN.
    mish(v) = v * tanh(log(1 + e)) = v * n / (n + 2) with e = exp(v) and n = e * (e + 2): no
    subtraction, so that it keeps its relative accuracy for negative v. NaN and infinities come out
    as in torch: mish(nan) = mish(-inf) = nan, mish(inf) = inf.
    """
    tanh_softplus = _build_tanh_softplus(jit, exp2, reciprocal)

    @jit
    def mish_add_hardtanh_scale(v, add_value, scale, low, high):
        tanh, _, _ = tanh_softplus(min(v, SATURATED))
        mish = v * tanh
        return minimum(maximum(mish + add_value, low), high) * scale

    return mish_add_hardtanh_scale


def build_backward(jit, exp2, reciprocal):
    """``backward(z, gy, add_value, scale, low, high)``: the gradient at the pre-activation z, of fp32 and in fp32.

    ``gy`` is the gradient at the output; the other arguments are ``build``'s. With its e and n, and r = 1 / (n + 2),

        mish'(z) = n r + 4 z e (e + 1) r^2

    has no cancellation but where it crosses 0, at z = -1.19. The gradient is 0 at both of hardtanh's
    bounds and beyond them, whatever ``gy``, and there the forward's output stands at a bound: the same
    operations decide. NaN and infinities come out as in torch: NaN wherever z is not finite. A finite z
    whose mish(z) + add_value is NaN gets 0.
    """
    tanh_softplus = _build_tanh_softplus(jit, exp2, reciprocal)

    @jit
    def backward(z, gy, add_value, scale, low, high):
        capped = min(z, SATURATED)
        tanh, e, r = tanh_softplus(capped)
        mish = z * tanh
        value = mish + add_value
        slope = tanh + capped * (FOUR * e * (e + ONE)) * (r * r)
        inside = (low < value) & (value < high)
        return (gy * scale) * slope if inside else z - z  # z - z is NaN where z is not finite

    return backward


def _build_tanh_softplus(jit, exp2, reciprocal):
    """``tanh_softplus(v)`` of v up to ``SATURATED``: (n r, e, r), the first of them tanh(log(1 + e))."""

    @jit
    def tanh_softplus(v):
        e = exp2(v * LOG2E)
        n = e * (e + TWO)
        r = reciprocal(n + TWO)
        return n * r, e, r

    return tanh_softplus
