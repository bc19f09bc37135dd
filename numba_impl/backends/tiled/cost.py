"""Which tile the tiled kernel uses for a problem: a few candidates, and a model of their time.

A geometry has at most six tiles, so that sizes that keep changing do not keep compiling. Only where none fits with all parities
in a block's code do blocks take one parity of rows each.
"""

import itertools
import math
from dataclasses import replace

from numba_impl.backends.tiled.tile import Tile
from numba_impl.gpu import Gpu

THREADS = 128
COL_GROUPS = (8, 2)  # wide and narrow images
REGISTERS = 65536  # of a multiprocessor
# Sums a thread -> blocks a multiprocessor: what the registers allow without spilling.
BUDGETS = {128: 2, 64: 4, 16: 4}
OTHER_REGISTERS = 45
RESERVED_SHARED = 1024  # bytes of shared memory a block that CUDA keeps
# Straight-line code for one input channel: taps, and multiply-adds. More takes minutes to compile.
MOST_TAPS, LARGEST_BODY = 128, 1600
MOST_KEPT = 160  # sums of a thread, and two registers for each pixel of a stage that it copies: with more some spill
# Fitted on an H200: instructions that a scheduler issues a cycle, with one warp and with many.
ONE_WARP, MANY_WARPS = 0.5, 0.72
SHORT_RUNS = 1.05  # narrow tiles store shorter runs and copy more of the halo
OUTPUT_INSTRUCTIONS, BLOCK_INSTRUCTIONS = 18, 1000


def choose(geometry, size, gpu: Gpu, staged=False) -> Tile | None:
    """The tile with the least predicted time for a ``Problem.size``, or None where none fits registers and shared memory.

    ``staged``: pixels go to shared memory through registers.
    """
    tiles = candidates(geometry, size[2], gpu, staged)
    return min(tiles, key=lambda tile: cycles(geometry, tile, size, gpu), default=None)


def candidates(geometry, out_channels, gpu: Gpu, staged=False) -> list[Tile]:
    """Tiles for a geometry: three amounts of work a thread, each for wide and for narrow images."""
    for row_parity in (False, True):
        found = []
        for sums, blocks in BUDGETS.items():
            shape = _thread_shape(geometry, sums, blocks, out_channels, row_parity, staged)
            for col_groups in COL_GROUPS if shape else ():
                channels, rows, cols = shape
                channel_groups = _channel_groups(channels, out_channels)
                row_groups = THREADS // (channel_groups * col_groups)
                tile = Tile(channels, rows, cols, channel_groups, row_groups, col_groups, blocks=blocks, row_parity=row_parity)
                tile = _fit_stage(geometry, tile, gpu, staged)
                if tile is not None and tile not in found:
                    found.append(tile)
        if found:
            return found
    return []


def _thread_shape(geometry, sums, blocks, out_channels, row_parity, staged):
    """(channels, rows, cols) of a thread: the most multiply-adds an instruction, within ``sums``; None if none fits."""
    fitting = []
    for channels, rows, cols in itertools.product(_channels(out_channels), (1, 2, 4), (1, 2, 4)):
        tile = Tile(channels, rows, cols, 16, 1, THREADS // 16, depth=1, blocks=blocks, row_parity=row_parity)
        fits = _sums(geometry, tile) <= sums and _registers(geometry, tile, staged=staged) <= _most_registers(tile)
        if fits and tile.part(geometry).taps <= MOST_TAPS and _body(geometry, tile) <= LARGEST_BODY:
            fitting.append((-_efficiency(geometry, tile), channels, rows, cols))
    return min(fitting)[1:] if fitting else None


def _channels(out_channels):
    """Output channels that a thread may have: all, if they are few."""
    return (1, 2, 4, 8) if out_channels >= 8 else (out_channels,)


def _sums(geometry, tile):
    return tile.part(geometry).parities * tile.channels * tile.rows * tile.cols


def _body(geometry, tile):
    """Multiply-adds of a thread for one input channel."""
    return tile.part(geometry).taps * tile.channels * tile.rows * tile.cols


def _registers(geometry, tile, unroll=1, staged=False):
    """Registers of a thread: sums, weights, the pixels of an unrolled step, an offset for each copied pixel, which if it is
    ``staged`` takes two more, the rest."""
    part = tile.part(geometry)
    pixels = (tile.rows + part.rows.reach) * (tile.cols + part.cols.reach)
    copies = _copies(geometry, tile) * (1 + 2 * staged)
    return _sums(geometry, tile) + pixels * unroll + tile.channels + copies + OTHER_REGISTERS


def _copies(geometry, tile):
    """Pixels of a stage that a thread copies."""
    return -(-math.prod(tile.pixel_stage(geometry)) // tile.threads)


def _most_registers(tile):
    return min(255, REGISTERS // (tile.threads * tile.blocks))


def _loads(geometry, tile):
    """Shared-memory loads of a thread for one input channel."""
    part = tile.part(geometry)
    reg_rows, reg_cols = tile.rows + part.rows.reach, tile.cols + part.cols.reach
    pixels = reg_rows * (reg_cols // 4 + reg_cols % 4 if tile.cols % 4 == 0 else reg_cols)
    return pixels + part.taps * (tile.channels // 4 if tile.channels % 4 == 0 else tile.channels)


def _efficiency(geometry, tile):
    """Multiply-adds as a share of a thread's instructions for one input channel."""
    body = _body(geometry, tile)
    return body / (body + _loads(geometry, tile) + 2)


def _channel_groups(channels, out_channels):
    """The largest number of groups that pads ``out_channels`` least."""
    return min((16, 8, 4, 2, 1), key=lambda groups: (-(-out_channels // (groups * channels)) * groups * channels, -groups))


def _fit_stage(geometry, tile, gpu, staged):
    """The tile with the deepest stage that fits shared memory and registers, unrolled as far as pays; None if none fits."""
    weights = tile.part(geometry).taps * tile.tile_channels
    for depth in (8, 4, 2, 1):
        deep = replace(tile, depth=depth)
        if depth * weights % 4:  # no whole vectors
            return None
        size = deep.shared(geometry).bytes
        fits = size <= gpu.shared_per_block and (size + RESERVED_SHARED) * tile.blocks <= gpu.shared_per_multiprocessor
        fits = fits and _sums(geometry, deep) + 2 * _copies(geometry, deep) <= MOST_KEPT
        if fits and _registers(geometry, deep, staged=staged) <= _most_registers(deep):
            return replace(deep, unroll=_unroll(geometry, deep, staged))
    return None


def _unroll(geometry, tile, staged):
    """Input channels to multiply in straight-line code: few enough to compile fast and to stay in registers."""
    for unroll in (4, 2):
        short = tile.part(geometry).taps * unroll <= 36 and _body(geometry, tile) * unroll <= 640
        if short and tile.depth % unroll == 0 and _registers(geometry, tile, unroll, staged) <= _most_registers(tile):
            return unroll
    return 1


def cycles(geometry, tile, size, gpu: Gpu) -> float:
    """Predicted clock cycles: the instructions of a warp, times the warps that a scheduler issues one after another."""
    depth, x_rows, x_cols = tile.pixel_stage(geometry)
    per_channel = _body(geometry, tile) / _efficiency(geometry, tile)
    copies = (3 * x_rows * x_cols + tile.part(geometry).taps * tile.tile_channels / 2) / tile.threads + 40 / depth
    channels = -(-size[1] // depth) * depth
    warp = channels * (per_channel + copies) + _sums(geometry, tile) * OUTPUT_INSTRUCTIONS + BLOCK_INSTRUCTIONS

    def wave(resident):
        """``resident`` blocks at once on a multiprocessor, which has four schedulers of 32 lanes."""
        return warp * max(resident * tile.threads / 128 / MANY_WARPS, 1 / ONE_WARP)

    full, rest = divmod(tile.grid(geometry, size)[-1], gpu.multiprocessors * tile.blocks)
    time = full * wave(tile.blocks) + (wave(-(-rest // gpu.multiprocessors)) if rest else 0)
    return time if tile.col_groups == max(COL_GROUPS) else time * SHORT_RUNS
