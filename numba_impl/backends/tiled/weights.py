"""Weights as the kernel reads them."""

from collections.abc import Callable

import torch
import torch.nn.functional as F

from numba_impl.backends.tiled.tile import Tile
from numba_impl.problem import Geometry


def packer(geometry: Geometry, tile: Tile) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function that gives a weight [C_in, C_out, KH, KW] as the kernel for a tile takes it: packed, or contiguous."""
    if not tile.packs(geometry):
        return torch.Tensor.contiguous
    return lambda weight: pack(weight, tile.depth, tile.tile_channels)


def pack(weight, depth, tile_channels) -> torch.Tensor:
    """[C_in, C_out, KH, KW] -> [C_out tiles, C_in, KH * KW, tile_channels].

    Contiguous, and zero where the last tile or the last stage of ``depth`` channels overhangs.
    """
    c_in, c_out, kh, kw = weight.shape
    flat = weight.reshape(c_in, c_out, kh * kw)
    if c_out % tile_channels or c_in % depth:
        flat = F.pad(flat, (0, 0, 0, -c_out % tile_channels, 0, -c_in % depth))
    tiles = flat.reshape(flat.shape[0], -1, tile_channels, kh * kw)
    return tiles.permute(1, 0, 3, 2).contiguous()
