"""Weights in the kernels' layouts, and back."""

import torch
import torch.nn.functional as F


def pack_tiled(weight, depth, tile_channels):
    """Weights for the tiled kernel: [C_in, C_out, KH, KW] -> [C_out tiles, C_in, KH * KW, tile_channels].

    Contiguous, and zero where the last tile or the last stage of ``depth`` channels overhangs.
    """
    c_in, c_out, kh, kw = weight.shape
    flat = weight.reshape(c_in, c_out, kh * kw)
    if c_out % tile_channels or c_in % depth:
        flat = F.pad(flat, (0, 0, 0, -c_out % tile_channels, 0, -c_in % depth))
    tiles = flat.reshape(flat.shape[0], -1, tile_channels, kh * kw)
    return tiles.permute(1, 0, 3, 2).contiguous()


def unpack_tiled(packed, shape):
    """Inverse of ``pack_tiled`` for a weight of ``shape``."""
    c_in, c_out, kh, kw = shape
    flat = packed.permute(1, 0, 3, 2).reshape(packed.shape[1], -1, kh * kw)
    return flat[:c_in, :c_out].reshape(shape)


def unpack_split(packed, factors, in_channels):
    """Weights from ``kernels.split``, [C_in, C_out, 3, 3] fp64: (hi + lo) * factor.

    ``packed`` is int32 [2 (hi, lo), 9, padded C_in / 8, C_out, 4], each a pair of fp16; ``factors`` is [C_out].
    """
    both = packed.view(torch.float16).double().sum(0)
    flat = both.permute(1, 3, 2, 0).reshape(-1, len(factors), 9)
    return (flat[:in_channels] * factors[:, None]).reshape(in_channels, -1, 3, 3)
