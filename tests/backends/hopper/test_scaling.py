"""Scales of rows, against what they are for: no fp16 overflows, and none loses what fp32 would keep."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from numba_impl.backends.hopper.scaling import FIRST, INFINITE, MAX_SHIFT, build

fits, choose = build(lambda function: function)

magnitudes = st.floats(0, width=32, allow_nan=False)


def bits(value):
    return int(np.float32(value).view(np.int32))


def row(*pixels):
    """(high, low) of pixels' largest |x|."""
    return bits(max(pixels)), min((bits(pixel) for pixel in pixels if pixel > 0), default=INFINITE)


@given(st.lists(magnitudes, min_size=1, max_size=8), st.integers(-MAX_SHIFT, MAX_SHIFT))
def test_a_scale_that_fits_keeps_what_fp32_keeps(pixels, shift):
    if fits(shift, *row(*pixels)):
        scaled = [np.ldexp(np.float64(np.float32(pixel)), shift) for pixel in pixels]
        assert max(scaled) < 2.0**15
        for value in filter(None, scaled):
            high = np.float64(np.float16(value))
            low = np.float64(np.float16(value - high))
            assert np.isfinite(high) and abs(value - high - low) <= max(2.0**-23 * value, 2.0**-25) <= 2.0**-23 * max(1, value)
            assert value >= 1


@given(st.lists(magnitudes, min_size=1, max_size=8), st.integers(-MAX_SHIFT, MAX_SHIFT))
def test_a_scale_is_kept_while_it_fits(pixels, shift):
    chosen = choose(shift, *row(*pixels))
    assert chosen == shift or (not fits(shift, *row(*pixels)) and fits(chosen, *row(*pixels)))
    assert -MAX_SHIFT <= chosen <= MAX_SHIFT


@pytest.mark.parametrize("scale", [1e-12, 1e-6, 1e-3, 1.0, 1e3, 32000.0, 33000.0, 1e4, 1e12])
def test_rows_like_the_first_fit_its_scale(scale):
    """Whatever the units: far larger or smaller than the first row, and no row of plain fp32 among them."""
    first = row(scale * 1.3, scale * 3.9)
    shift = choose(FIRST, *first)
    assert fits(shift, *first)
    for factor in (0.02, 0.5, 1, 2, 30):
        assert fits(shift, *row(factor * scale * 1.3, factor * scale * 3.9)), factor


@pytest.mark.parametrize(
    "values", [(1.0, float("inf")), (float("nan"), 1.0), (1e-6, 1.0), (1e-30, 1e-30), (1e30, 1e30), (1e-40, 1e-40)]
)
def test_rows_that_no_scale_fits(values):
    high = max(bits(value) for value in values)
    low = min(bits(value) for value in values)
    assert not fits(choose(0, high, low), high, low)
    assert choose(3, high, low) == 3


@pytest.mark.parametrize("shift", [-MAX_SHIFT, 0, MAX_SHIFT])
def test_zeros_fit_every_scale_and_change_none(shift):
    assert fits(shift, *row(0.0, 0.0)) and choose(shift, *row(0.0, 0.0)) == shift
    assert choose(shift, *row(0.0, 1.0)) == choose(shift, *row(1.0))
