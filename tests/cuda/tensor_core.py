"""What ldmatrix and wgmma do, in NumPy: they move and multiply as the PTX ISA says, with the maps of ``fragments``."""

import numpy as np

from numba_impl.cuda import fragments

THREADS, LANES = np.arange(128), np.arange(32)


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
    """What ``hopper.products`` does by these steps, exactly: {tile: sums [threads, columns / 2]}."""
    tiles = {}
    row, column = fragments.accumulator(THREADS[:, None], np.arange(columns // 2))
    for loads, products in steps:
        operands = [as_operand(load_fragment(x, bases[base] + offset)) for base, offset in loads]
        for tile, fragment, _, start in products:
            product = operands[fragment] @ as_weights(weights, start, columns)
            tiles[tile] = tiles.get(tile, 0) + product[row, column]
    return tiles
