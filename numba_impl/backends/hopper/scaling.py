"""Powers of two that bring a row of x into fp16's range, as exponents.

A row is known by the bits of its largest |x| (``high``), and of the smallest of its pixels' largest |x| (``low``),
where a pixel of zeros does not count: INFINITE if all are.
"""

from collections.abc import Callable
from typing import NamedTuple

from numba import float32, int32

from numba_impl.cuda.device import device
from numba_impl.cuda.ptx import maths

INFINITE = 0x7F800000
MAX_SHIFT = 60  # scales are 2^-60 ... 2^60, as the weights' are, so that a product of two is a normal number
# A scale is chosen so that the row's largest becomes 2^8 ... 2^9. It is kept while every row's largest stays below 2^15, and
# every pixel's largest is zero or at least 1: lo is then exact to 2^-25 of that, a quarter of fp32's rounding.
TARGET, HIGHEST, LOWEST = 8, 14, 0
FIRST = MAX_SHIFT  # before the first row: fits no row but one that has no other choice
ANY, NONE = float32(-1), float32(0)  # instead of what undoes a row's scale: the row is zero; no scale fits


class Choice(NamedTuple):
    """Functions of integers."""

    fits: Callable  # (shift, high, low): whether 2^shift serves a row; any scale does if it is zero
    choose: Callable  # (shift, high, low): the exponent for a row: the present one while it fits, else one made for it, if any is


def build(jit) -> Choice:
    """Compiled by ``jit``."""

    @jit
    def fits(shift, high, low):
        top, bottom = (high >> 23) - 127, (low >> 23) - 127  # 2^top <= high < 2^(top + 1)
        return high == 0 or (high < INFINITE and top + shift <= HIGHEST and bottom + shift >= LOWEST)

    @jit
    def choose(shift, high, low):
        fresh = min(max(TARGET + 127 - (high >> 23), -MAX_SHIFT), MAX_SHIFT)
        return shift if fits(shift, high, low) or not fits(fresh, high, low) else fresh

    return Choice(fits, choose)


fits, choose = build(device)


@device
def power(exponent):
    """2^exponent, fp32."""
    return maths.from_bits(int32((127 + exponent) << 23))


@device
def undoing(shift, high, low):
    """What undoes the scale 2^shift of a row, or ``ANY`` or ``NONE``."""
    return ANY if high == 0 else power(-shift) if fits(shift, high, low) else NONE


@device
def undoing_both(undo, other):
    """What undoes the scales of two rows at once, or ``NONE``."""
    own = other if undo == ANY else undo
    return own if other == own or other == ANY else NONE
