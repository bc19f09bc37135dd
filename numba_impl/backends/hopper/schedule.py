"""The products of a unit, from the parity algebra of the kernel's geometry.

A tap takes a cell's pixel, or the one a row below, a column beside, or both, to the cell's outputs of one parity. Shifts
and parities are counted 2 * row + column.
"""

from typing import NamedTuple

from numba_impl.backends.hopper.layout import GEOMETRY, PLANE, Config

ROWS, COLS = GEOMETRY.rows, GEOMETRY.cols
TAPS, PARITIES, SHIFTS = GEOMETRY.taps, GEOMETRY.parities, (ROWS.reach + 1) * (COLS.reach + 1)
PARITY = tuple(2 * row + col for row in ROWS.parities for col in COLS.parities)  # that a tap feeds
SHIFT = tuple(2 * row + col for row in ROWS.shifts for col in COLS.shifts)  # of the pixel that it takes


class Load(NamedTuple):
    """A fragment of x: from ``offset`` bytes after the address that a thread has for a shift."""

    shift: int
    offset: int


class Product(NamedTuple):
    """One wgmma: into the sums of a parity; from the step's fragment ``load``; by the matrix ``offset``, in 16 bytes, after
    that of a descriptor."""

    parity: int
    load: int
    descriptor: int
    offset: int


class Step(NamedTuple):
    """Products that are issued together, once their fragments are loaded."""

    loads: list[Load]
    products: list[Product]


def schedule(config: Config) -> list[Step]:
    """The small terms come first: the tensor core truncates at every addition, by an amount in proportion to the sum so far."""
    lo_x, lo_w = PLANE, config.shared.places.weights.step // 16
    tap_size, depth_size = lo_w // TAPS, 2 * config.out_channels
    steps = []
    for x_offset, w_offset in ((lo_x, 0), (0, lo_w), (0, 0))[-config.terms :]:
        descriptor = int(x_offset == w_offset)  # one for hi * hi, another for the rest: ``consume`` says why
        for k in range(config.steps):
            for shifts in ((0,), (1, 2, 3)):
                loads = [Load(shift, 32 * k + x_offset) for shift in shifts]
                products = [
                    Product(PARITY[tap], shifts.index(SHIFT[tap]), descriptor, w_offset + tap * tap_size + k * depth_size)
                    for tap in range(TAPS)
                    if SHIFT[tap] in shifts
                ]
                steps.append(Step(loads, products))
    return steps
