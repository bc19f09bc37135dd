"""The maps of the tensor-core kernel, alone and together: a unit's products, carried out on the CPU as they are scheduled."""

import numpy as np
import pytest
import torch

from numba_impl.backends import reference
from numba_impl.backends.tiled.weights import unpack_split
from numba_impl.cuda import fragments
from numba_impl.problem import Geometry

GEOMETRY = Geometry.of(3, 2, 1, 1)
STRIP = 64  # cells of a unit, which meet one pixel more
BANKS = 8  # of 16 bytes, of which an access of eight threads at a time should meet each once
THREADS, LANES = np.arange(128), np.arange(32)
ROWS = fragments.pixel(np.arange(64))


def once(count, *numbers):
    """Whether the numbers, together, are 0 ... count - 1, each once."""
    return np.array_equal(np.sort(np.concatenate([np.ravel(n) for n in numbers])), np.arange(count))


def load_fragment(memory, addresses):
    """ldmatrix.x4 by a warpgroup: [threads, 4 registers, 2] fp16 from bytes in memory, by an address a thread.

    The threads 8 m ... 8 m + 7 of a warp point at the rows of matrix m, 16 bytes each; lane l receives in
    register m the elements 2 (l % 4) and the next of row l // 4.
    """
    rows = memory[addresses[:, None] + np.arange(16)].view(np.float16)
    return rows.reshape(4, 4, 32, 2).swapaxes(1, 2).reshape(128, 4, 2)


def as_operand(registers):
    """A [64, 16] that wgmma takes from a fragment's registers, in fp64."""
    a = np.full((64, 16), np.nan)
    row, k = fragments.operand(THREADS[:, None], np.arange(4))
    a[row[:, :, None], k[:, :, None] + np.arange(2)] = registers
    return a


def as_weights(memory, start, columns):
    """B [16, columns] that wgmma takes by a descriptor, in fp64: core matrices of 8 rows (of columns of B) of 16 bytes."""
    k, column = np.arange(16)[:, None], np.arange(columns)
    address = 16 * start + k // 8 * (16 * columns) + column // 8 * 128 + column % 8 * 16 + k % 8 * 2
    return memory.view(np.float16)[address // 2].astype(np.float64)


def multiply(steps, columns, x, bases, weights):
    """What ``kernels.products`` does by these steps, exactly: {tile: sums [threads, columns / 2]}."""
    tiles = {}
    row, column = fragments.accumulator(THREADS[:, None], np.arange(columns // 2))
    for loads, multiplications in steps:
        operands = [as_operand(load_fragment(x, bases[base] + offset)) for base, offset in loads]
        for tile, fragment, _, start in multiplications:
            product = operands[fragment] @ as_weights(weights, start, columns)
            tiles[tile] = tiles.get(tile, 0) + product[row, column]
    return tiles


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
        memory[(row * row_bytes + plane + fragments.pixel_offset(pixel)) // 2 + channel] = half.numpy()
    return memory.view(np.uint8)


def pack(halves, padded):
    """fp16 [C_in, C_out, 3, 3] in the layout of ``kernels.split``, int32."""
    c_in, c_out = halves[0].shape[:2]
    packed = torch.zeros(2, 9, padded * c_out, dtype=torch.float16)
    c, channel, tap = torch.meshgrid(*map(torch.arange, (c_in, c_out, 9)), indexing="ij")
    for number, half in enumerate(halves):
        packed[number, tap, fragments.weight_element(c, channel, c_out)] = half.reshape(c_in, c_out, 9)
    return packed.view(torch.int32).reshape(2, 9, padded // 8, c_out, 4)


@pytest.mark.parametrize("columns", [8, 16, 24, 64, 256])
def test_accumulators_are_each_element_once(columns):
    row, column = fragments.accumulator(THREADS[:, None], np.arange(columns // 2))
    assert once(64 * columns, row * columns + column)


def test_operands_are_each_element_once():
    row, k = fragments.operand(THREADS[:, None], np.arange(4))
    assert once(64 * 16, row * 16 + k, row * 16 + k + 1)


def test_loaded_rows_fill_the_operands():
    a = np.arange(64 * 16).astype(np.float16).reshape(64, 16)
    row, k = fragments.loaded_row(THREADS)
    loaded = load_fragment(a.view(np.uint8).ravel(), row * 32 + k * 2)
    assert np.array_equal(as_operand(loaded), a)


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
    stored = fragments.stored_lane(LANES)
    assert once(32, stored)
    for warp in range(4):
        for register in range(32):
            row, column = fragments.accumulator(32 * warp + stored, register)
            start = ROWS[row] // 2 * 16
            assert np.array_equal(column, np.repeat(column[::8], 8)), "eight lanes have several channels"
            assert np.array_equal(start, 128 * warp + np.tile(np.arange(0, 128, 16), 4))


def test_pixels_do_not_overlap():
    offsets = np.sort(fragments.pixel_offset(np.arange(STRIP + 1)))
    assert offsets[0] == 0 and (np.diff(offsets) >= 2 * 64).all() and not (offsets % 16).any()


def test_neighbours_are_written_to_different_banks():
    chunks = fragments.pixel_offset(np.arange(STRIP)) // 16
    for eight in chunks.reshape(-1, 8):
        assert once(BANKS, eight % BANKS)


@pytest.mark.parametrize("shift", [0, 1])
def test_rows_are_read_from_different_banks(shift):
    row, k = fragments.loaded_row(THREADS)
    chunks = (fragments.pixel_offset(fragments.pixel(row) + shift) + 2 * k) // 16
    for eight in chunks.reshape(-1, 8):
        assert once(BANKS, eight % BANKS)


@pytest.mark.parametrize("terms", [3, 1])
@pytest.mark.parametrize(("c_in", "c_out"), [(64, 64), (24, 16), (8, 8)])
def test_products_are_the_convolution(c_in, c_out, terms):
    """A unit, of 64 cells: schedule, maps and packing together give every channel and parity, to the last bit."""
    from numba_impl.backends.hopper import kernel as hopper  # here, as the simulator's process collects this file too

    config = hopper.Config(c_in, c_out, terms, 4)
    padded = 16 * config.steps
    x, weight = draw(c_in, 2, STRIP + 1), draw(c_in, c_out, 3, 3)
    packed = pack(weight, padded)
    x_hi, x_lo, w_hi, w_lo = (half.double() for half in (*x, *weight))
    assert torch.equal(unpack_split(packed, torch.ones(c_out), c_in), w_hi + w_lo)

    beyond = torch.zeros(padded - c_in, 2, STRIP + 1, dtype=torch.float16)
    memory = in_shared_memory([torch.cat([half, beyond]) for half in x[: config.halves]], config.row_bytes)
    row, k = fragments.loaded_row(THREADS)
    own = [fragments.pixel_offset(fragments.pixel(row) + shift) + 2 * k for shift in (0, 1)]
    bases = [*own, *(at + config.row_bytes for at in own)]
    tiles = multiply(hopper.schedule(config), c_out, memory, bases, packed.numpy().view(np.uint8).ravel())

    want = reference.conv_transpose2d(x_hi[None], w_hi, None, GEOMETRY)
    if terms == 3:
        want = reference.conv_transpose2d((x_hi + x_lo)[None], w_hi + w_lo, None, GEOMETRY)
        want -= reference.conv_transpose2d(x_lo[None], w_lo, None, GEOMETRY)  # the term left out
    row, channel = fragments.accumulator(THREADS[:, None], np.arange(c_out // 2))
    for parity in range(4):
        a, b = divmod(parity, 2)
        assert np.array_equal(tiles[parity], want.numpy()[0, channel, a, 2 * ROWS[row] + b]), f"output parity {a, b}"
