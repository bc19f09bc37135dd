"""A unit's products, carried out on the CPU as they are scheduled."""

import numpy as np
import pytest
import torch

from numba_impl import convolution
from numba_impl.backends.hopper import layout
from numba_impl.backends.hopper.layout import STRIP, Config
from numba_impl.backends.hopper.schedule import PARITIES, PARITY, SHIFT, SHIFTS, TAPS, schedule
from numba_impl.cuda import fragments
from numba_impl.problem import Geometry
from tests.backends.hopper.packed import pack, unpack
from tests.cuda.tensor_core import THREADS, multiply

GEOMETRY = Geometry.of(3, 2, 1, 1)
ROWS = layout.pixel(np.arange(64))


def draw(*shape):
    """(hi, lo) of values of 22 bits at most and one unit, so that fp64 sums their products exactly, in any order."""
    value = torch.randint(-(2**21), 2**21 + 1, shape) * 2.0**-11
    hi = value.half()
    return hi, (value - hi).half()


def in_shared_memory(halves, row_bytes):
    """Bytes of two rows of the ring: fp16 [channels, 2 rows, 65 pixels] as the producer stores them, NaN in between."""
    memory = np.full(2 * row_bytes // 2, np.nan, np.float16)
    channel, row, pixel = np.ogrid[: len(halves[0]), :2, : STRIP + 1]
    for number, half in enumerate(halves):
        plane = number * row_bytes // len(halves)
        memory[(row * row_bytes + plane + layout.pixel_offset(pixel)) // 2 + channel] = half.numpy()
    return memory.view(np.uint8)


def test_taps():
    """Tap (kh, kw) feeds parity (kh != 1, kw != 1) from the pixel at shift (kh == 0, kw == 0)."""
    assert (TAPS, PARITIES, SHIFTS) == (9, 4, 4)
    assert PARITY == tuple(2 * (kh != 1) + (kw != 1) for kh in range(3) for kw in range(3))
    assert SHIFT == tuple(2 * (kh == 0) + (kw == 0) for kh in range(3) for kw in range(3))


@pytest.mark.parametrize("terms", [3, 1])
@pytest.mark.parametrize(("c_in", "c_out"), [(64, 64), (24, 16), (8, 8)])
def test_products_are_the_convolution(c_in, c_out, terms):
    """A unit, of 64 cells: schedule, maps and packing together give every channel and parity, to the last bit."""
    config = Config(c_in, c_out, terms, 4)
    padded, row_bytes = 16 * config.steps, config.shared.places.ring.step
    x, weight = draw(c_in, 2, STRIP + 1), draw(c_in, c_out, 3, 3)
    packed = pack(weight, padded)
    x_hi, x_lo, w_hi, w_lo = (half.double() for half in (*x, *weight))
    assert torch.equal(unpack(packed, torch.ones(c_out), c_in), w_hi + w_lo)

    beyond = torch.zeros(padded - c_in, 2, STRIP + 1, dtype=torch.float16)
    memory = in_shared_memory([torch.cat([half, beyond]) for half in x[: config.halves]], row_bytes)
    row, k = fragments.loaded_row(THREADS)
    own = [layout.pixel_offset(layout.pixel(row) + shift) + 2 * k for shift in (0, 1)]
    bases = [*own, *(at + row_bytes for at in own)]
    tiles = multiply(schedule(config), c_out, memory, bases, packed.numpy().view(np.uint8).ravel())

    want = convolution.forward(x_hi[None], w_hi, None, GEOMETRY)
    if terms == 3:
        want = convolution.forward((x_hi + x_lo)[None], w_hi + w_lo, None, GEOMETRY)
        want -= convolution.forward(x_lo[None], w_lo, None, GEOMETRY)  # the term left out
    row, channel = fragments.accumulator(THREADS[:, None], np.arange(c_out // 2))
    for parity in range(4):
        a, b = divmod(parity, 2)
        assert np.array_equal(tiles[parity], want.numpy()[0, channel, a, 2 * ROWS[row] + b]), f"output parity {a, b}"
