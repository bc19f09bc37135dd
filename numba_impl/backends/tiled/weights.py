"""Weights as the kernel reads them."""

from collections.abc import Callable

import torch
from numba import cuda, float32, int64
from numba.cuda import types

from numba_impl.backends.tiled.tile import Tile
from numba_impl.cuda import values
from numba_impl.cuda.kernel import Kernel, built
from numba_impl.problem import Geometry, Problem

THREADS = 256


@built
def build(geometry: Geometry, tile: Tile, stored: torch.dtype, rounded: torch.dtype) -> Kernel:
    """The kernel that packs weights of a dtype, rounded to another."""
    element, _, widen, _, _ = values.of(stored)
    rounds = values.of(rounded).round
    part, (PH, SH, KH) = tile.part(geometry), (geometry.rows.padding, geometry.rows.stride, geometry.rows.kernel_size)
    TAPS, COLS, CHANNELS, SPLIT = part.taps, part.cols.kernel_size, tile.tile_channels, tile.row_parity

    def pack(weight, packed, size, depth, tiles, in_channels, out_channels, strides):
        # weight [in_channels, out_channels, KH, KW]; packed fp32 [row parities, tiles, depth, TAPS, CHANNELS]
        e = int64(cuda.grid(1))
        if e < size:
            channel, tap = e % CHANNELS, e // CHANNELS % TAPS
            i, tile_number = e // (CHANNELS * TAPS) % depth, e // (CHANNELS * TAPS * depth)
            o = tile_number % tiles * CHANNELS + channel
            row, col = tap // COLS, tap % COLS
            if SPLIT:
                row = (tile_number // tiles + PH) % SH + SH * row
            value = float32(0)
            if i < in_channels and o < out_channels and row < KH:
                value = rounds(widen(weight[i * strides[0] + o * strides[1] + row * strides[2] + col * strides[3]]))
            packed[e] = value

    n = types.int64
    signature = types.void(types.CPointer(element), types.CPointer(types.float32), n, n, n, n, n, types.UniTuple(n, 4))
    return Kernel(pack, signature, THREADS, 1, config=(geometry, tile, str(stored), str(rounded)))


def packer(problem: Problem, tile: Tile) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function that packs a weight [C_in, C_out, KH, KW], of any strides, for a tile.

    fp32 [row parities, C_out tiles, C_in, taps of a parity, tile_channels]; zero where the last tile, the last stage or the last
    tap of a parity overhangs.
    """
    geometry, dtype = problem.geometry, problem.weight.dtype
    depth, tiles = -(-problem.in_channels // tile.depth) * tile.depth, -(-problem.out_channels // tile.tile_channels)
    shape = tile.row_parities(geometry), tiles, depth, tile.part(geometry).taps, tile.tile_channels
    size = torch.Size(shape).numel()
    numbers = size, depth, tiles, problem.in_channels, problem.out_channels
    launch = build(geometry, tile, dtype, problem.dtype).prepare(problem.device, -(-size // THREADS), *numbers)

    def pack(weight):
        packed = torch.empty(shape, dtype=torch.float32, device=weight.device)
        launch((weight, packed), (weight.stride(),))
        return packed

    return pack
