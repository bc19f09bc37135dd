"""The scalar maths after the convolution, written once for every target."""

import numpy as np

LOG2E = np.float32(1.4426950408889634)
TWO = np.float32(2)
# From here on tanh(softplus(v)) rounds to 1; it also keeps e * (e + 2) finite.
SATURATED = np.float32(20)


def build(jit, exp2, reciprocal, minimum, maximum):
    """``mish_add_hardtanh_scale(v, add_value, scale, low, high)`` of one fp32 pre-activation, compiled by ``jit``.

    The other arguments are the target's operations on fp32; ``minimum`` and ``maximum`` keep NaN.
    mish(v) = v * tanh(log(1 + e)) = v * n / (n + 2) with e = exp(v) and n = e * (e + 2): no
    subtraction, so that it keeps its relative accuracy for negative v. NaN and infinities come out
    as in torch: mish(nan) = mish(-inf) = nan, mish(inf) = inf.
    """

    @jit
    def mish_add_hardtanh_scale(v, add_value, scale, low, high):
        e = exp2(min(v, SATURATED) * LOG2E)
        n = e * (e + TWO)
        mish = v * (n * reciprocal(n + TWO))
        return minimum(maximum(mish + add_value, low), high) * scale

    return mish_add_hardtanh_scale
