"""Which tile the tiled kernel uses for a problem: a few candidates, and a model of their time.

A geometry has at most six tiles, so that sizes that keep changing do not keep compiling.
"""

import functools
import itertools
import math
from dataclasses import replace

from numba_impl.backends.tiled.kernel import Tile

THREADS = 128
COL_GROUPS = (8, 2)  # wide and narrow images
REGISTERS = 65536  # of a multiprocessor
# Sums a thread -> blocks a multiprocessor: what the registers allow without spilling.
BUDGETS = {128: 2, 64: 4, 16: 4}
OTHER_REGISTERS = 45
RESERVED_SHARED = 1024  # bytes of shared memory a block that CUDA keeps
# Straight-line code for one input channel: taps, and multiply-adds. More takes minutes to compile.
MOST_TAPS, LARGEST_BODY = 128, 1600
# Fitted on an H200: instructions that a scheduler issues a cycle, with one warp and with many.
ONE_WARP, MANY_WARPS = 0.5, 0.72
SHORT_RUNS = 1.05  # narrow tiles store shorter runs and copy more of the halo
OUTPUT_INSTRUCTIONS, BLOCK_INSTRUCTIONS = 18, 1000
# The same of cuDNN and the pointwise kernel after it: cycles to start, and operations a multiprocessor a cycle in fp32 where it
# is a convolution and where it is a matrix product, and in TF32 at stride 1. At other strides TF32 takes the same time for
# whatever taps and up to 128 output channels: cycles of a multiprocessor for a pixel of the output and an input channel.
COMPOSITE_START, COMPOSITE_CONVOLUTION, COMPOSITE_PRODUCT = 24_000, 64, 120
COMPOSITE_TF32, COMPOSITE_TF32_CHANNELS, COMPOSITE_TF32_PIXEL = 1700, 128, 1.3


@functools.lru_cache(maxsize=1024)
def choose(geometry, size, multiprocessors, shared_per_block, shared_per_sm):
    """The tile with the least predicted time for a ``Problem.size``, or None where none fits registers and shared memory."""
    tiles = candidates(geometry, size[2], shared_per_block, shared_per_sm)
    return min(tiles, key=lambda tile: cycles(geometry, tile, size, multiprocessors), default=None)


@functools.lru_cache(maxsize=256)
def candidates(geometry, out_channels, shared_per_block, shared_per_sm):
    """Tiles for a geometry: three amounts of work a thread, each for wide and for narrow images."""
    found = []
    for sums, blocks in BUDGETS.items():
        shape = _thread_shape(geometry, sums, blocks, out_channels)
        for col_groups in COL_GROUPS if shape else ():
            channels, rows, cols = shape
            channel_groups = _channel_groups(channels, out_channels)
            row_groups = THREADS // (channel_groups * col_groups)
            tile = Tile(channels, rows, cols, channel_groups, row_groups, col_groups, blocks=blocks)
            tile = _fit_stage(geometry, tile, shared_per_block, shared_per_sm)
            if tile is not None and tile not in found:
                found.append(tile)
    return found


def _thread_shape(geometry, sums, blocks, out_channels):
    """(channels, rows, cols) of a thread: the most multiply-adds an instruction, within ``sums``; None if none fits."""
    fitting = []
    for channels, rows, cols in itertools.product((1, 2, 4, 8), (1, 2, 4), (1, 2, 4)):
        tile = Tile(channels, rows, cols, 16, 1, THREADS // 16, depth=1, blocks=blocks)
        fits = _sums(geometry, tile) <= sums and _registers(geometry, tile) <= _most_registers(tile)
        if fits and channels < 2 * out_channels and geometry.taps <= MOST_TAPS and _body(geometry, tile) <= LARGEST_BODY:
            fitting.append((-_efficiency(geometry, tile), channels, rows, cols))
    return min(fitting)[1:] if fitting else None


def _sums(geometry, tile):
    return geometry.parities * tile.channels * tile.rows * tile.cols


def _body(geometry, tile):
    """Multiply-adds of a thread for one input channel."""
    return geometry.taps * tile.channels * tile.rows * tile.cols


def _registers(geometry, tile, unroll=1):
    """Registers of a thread: sums, weights, the pixels of an unrolled step, an offset a copied pixel, the rest."""
    pixels = (tile.rows + geometry.rows.reach) * (tile.cols + geometry.cols.reach)
    copies = -(-math.prod(tile.pixel_stage(geometry)) // tile.threads)
    return _sums(geometry, tile) + pixels * unroll + tile.channels + copies + OTHER_REGISTERS


def _most_registers(tile):
    return min(255, REGISTERS // (tile.threads * tile.blocks))


def _loads(geometry, tile):
    """Shared-memory loads of a thread for one input channel."""
    reg_rows, reg_cols = tile.rows + geometry.rows.reach, tile.cols + geometry.cols.reach
    pixels = reg_rows * (reg_cols // 4 + reg_cols % 4 if tile.cols % 4 == 0 else reg_cols)
    return pixels + geometry.taps * (tile.channels // 4 if tile.channels % 4 == 0 else tile.channels)


def _efficiency(geometry, tile):
    """Multiply-adds as a share of a thread's instructions for one input channel."""
    body = _body(geometry, tile)
    return body / (body + _loads(geometry, tile) + 2)


def _channel_groups(channels, out_channels):
    """The largest number of groups that pads ``out_channels`` least, in whole 16-byte vectors."""
    options = [groups for groups in (16, 8, 4, 2, 1) if groups * channels % 4 == 0]
    return min(options, key=lambda groups: (-(-out_channels // (groups * channels)) * groups * channels, -groups))


def _fit_stage(geometry, tile, shared_per_block, shared_per_sm):
    """The tile with the deepest stage that fits shared memory and registers, unrolled as far as pays; None if none fits."""
    for depth in (8, 4, 2, 1):
        deep = replace(tile, depth=depth)
        size = deep.shared_bytes(geometry)
        fits = size <= shared_per_block and (size + RESERVED_SHARED) * tile.blocks <= shared_per_sm
        if fits and _registers(geometry, deep) <= _most_registers(deep):
            return replace(deep, unroll=_unroll(geometry, deep))
    return None


def _unroll(geometry, tile):
    """Input channels to multiply in straight-line code: few enough to compile fast and to stay in registers."""
    for unroll in (4, 2):
        short = geometry.taps * unroll <= 36 and _body(geometry, tile) * unroll <= 640
        if short and tile.depth % unroll == 0 and _registers(geometry, tile, unroll) <= _most_registers(tile):
            return unroll
    return 1


@functools.lru_cache(maxsize=4096)
def cycles(geometry, tile, size, multiprocessors):
    """Predicted clock cycles: the instructions of a warp, times the warps a scheduler issues one after another."""
    batch, in_channels, out_channels, height, width = size
    blocks = tile.grid(geometry, batch, out_channels, height, width)[-1]
    per_channel = _body(geometry, tile) / _efficiency(geometry, tile)
    depth, x_rows, x_cols = tile.pixel_stage(geometry)
    copies = (3 * x_rows * x_cols + geometry.taps * tile.tile_channels / 2) / tile.threads + 40 / depth
    channels = -(-in_channels // depth) * depth
    warp = channels * (per_channel + copies) + _sums(geometry, tile) * OUTPUT_INSTRUCTIONS + BLOCK_INSTRUCTIONS

    def wave(resident):
        """Of ``resident`` blocks a multiprocessor, which has four schedulers of 32 lanes."""
        return warp * max(resident * tile.threads / 128 / MANY_WARPS, 1 / ONE_WARP)

    full, rest = divmod(blocks, multiprocessors * tile.blocks)
    time = full * wave(tile.blocks) + (wave(-(-rest // multiprocessors)) if rest else 0)
    return time if tile.col_groups == max(COL_GROUPS) else time * SHORT_RUNS


def composite_cycles(geometry, size, multiprocessors, precision):
    """Predicted clock cycles of torch's convolution and the pointwise kernel, for comparison; in TF32 the least."""
    batch, in_channels, out_channels, height, width = size
    pixels = batch * geometry.rows.output_size(height) * geometry.cols.output_size(width)
    if precision == "tf32" and geometry.parities > 1:
        passes = -(-out_channels // COMPOSITE_TF32_CHANNELS)
        return COMPOSITE_START + pixels * in_channels * passes * COMPOSITE_TF32_PIXEL / multiprocessors
    operations = 2 * pixels * out_channels * in_channels * geometry.taps / geometry.parities
    rate = COMPOSITE_PRODUCT if geometry.taps == geometry.parities == 1 else COMPOSITE_CONVOLUTION
    return COMPOSITE_START + operations / ((rate if precision == "fp32" else COMPOSITE_TF32) * multiprocessors)
