"""Which pixel is which row and where it lies; what a block's shared memory holds; how blocks share the work."""

import numpy as np
import pytest

from numba_impl.backends.hopper import layout
from numba_impl.backends.hopper.layout import STRIP, Config
from numba_impl.cuda import fragments
from tests.cases import GPUS
from tests.cuda.tensor_core import LANES, THREADS, once

BANKS = 8  # of 16 bytes, of which an access of eight threads at a time should meet each once
ROWS = layout.pixel(np.arange(64))


def test_rows_are_each_pixel_once():
    assert once(64, ROWS)


def test_rows_of_a_thread_are_neighbours():
    """A thread's sums of one channel: rows r and r + 8, an even pixel and the next."""
    for first in range(0, 32, 4):
        for register in (first, first + 1):
            row, column = fragments.accumulator(THREADS, register)
            next_row, same_column = fragments.accumulator(THREADS, register + 2)
            assert np.array_equal(column, same_column) and np.array_equal(next_row, row + 8)
            assert np.array_equal(ROWS[next_row], ROWS[row] + 1) and not (ROWS[row] % 2).any()


def test_eight_lanes_store_a_line():
    """Of one channel and row: two pixels a lane, two outputs a pixel, 128 bytes that start at a multiple of it."""
    stored = layout.stored_lane(LANES)
    assert once(32, stored)
    for warp in range(4):
        for register in range(32):
            row, column = fragments.accumulator(32 * warp + stored, register)
            start = ROWS[row] // 2 * 16
            assert np.array_equal(column, np.repeat(column[::8], 8)), "eight lanes have several channels"
            assert np.array_equal(start, 128 * warp + np.tile(np.arange(0, 128, 16), 4))


def test_pixels_do_not_overlap():
    offsets = np.sort(layout.pixel_offset(np.arange(STRIP + 1)))
    assert offsets[0] == 0 and (np.diff(offsets) >= 2 * 64).all() and not (offsets % 16).any()
    assert offsets[-1] + 2 * 64 <= layout.PLANE


def test_neighbours_are_written_to_different_banks():
    chunks = layout.pixel_offset(np.arange(STRIP)) // 16
    for eight in chunks.reshape(-1, 8):
        assert once(BANKS, eight % BANKS)


@pytest.mark.parametrize("shift", [0, 1])
def test_rows_are_read_from_different_banks(shift):
    row, k = fragments.loaded_row(THREADS)
    chunks = (layout.pixel_offset(layout.pixel(row) + shift) + 2 * k) // 16
    for eight in chunks.reshape(-1, 8):
        assert once(BANKS, eight % BANKS)


@pytest.mark.parametrize("terms", [3, 1])
@pytest.mark.parametrize(("c_in", "c_out"), [(64, 64), (24, 16), (8, 8), (40, 56)])
def test_shared_memory(c_in, c_out, terms):
    """Offsets as they have been, one after another, and no byte more than the configurations that were measured."""
    halves, slots, stages = (2, 3, 1) if terms == 3 else (1, 4, 2)
    row, stage, weights = 9408 * halves, 4 * 68 * c_in, halves * 9 * 16 * -(-c_in // 16) * c_out * 2
    sizes = {
        **{"weights": weights, "stages": stages * stage, "ring": slots * row, "channels": 8 * c_out, "maxima": 2 * 528},
        **{"sizes": 16, "scales": 16, "full": 8 * slots, "empty": 8 * slots, "staged": 8 * stages, "loaded": 8, "descriptor": 4},
    }
    shared = Config(c_in, c_out, terms, 4).shared
    ends = np.cumsum(list(sizes.values()))
    assert shared.places._fields == tuple(sizes)
    assert [place.at for place in shared.places] == [0, *ends[:-1]]
    assert shared.places.ring.step == row and shared.places.weights.step == weights // halves
    assert shared.bytes == ends[-1] <= weights + stages * stage + slots * row + 8 * c_out + 1200
    assert not any(place.at % 128 for place in (shared.places.weights, shared.places.stages)), "the bulk copy engine refuses"


@pytest.mark.parametrize("terms", [3, 1])
def test_the_largest_configuration_fits_a_block(terms):
    assert Config(64, 64, terms, 4).shared.bytes <= GPUS[9, 0].shared_per_block


@pytest.mark.parametrize("multiprocessors", [1, 3, 132])
@pytest.mark.parametrize("size", [(1, 1, 1), (128, 128, 128), (1, 2, 9000), (300, 1, 65)], ids=str)
def test_blocks_share_the_units_of_every_strip(size, multiprocessors):
    """As many blocks as multiprocessors, if there are enough, and the same number for each strip, of at least a unit."""
    batch, height, width = size
    strips, units, blocks = layout.grid(batch, height, width, multiprocessors)
    assert strips == -(-width // 64) and units == batch * height
    assert blocks % strips == 0 and 1 <= blocks // strips <= units
    assert blocks == strips or blocks <= multiprocessors


def test_sizes_beyond_32_bits():
    assert not layout.too_large(2**15, 2**16 - 2, 2**29 - 1)
    assert "32-bit" in layout.too_large(2**15, 2**16 - 1, 1) and "32-bit" in layout.too_large(1, 1, 2**29)
