"""Packed weights: an exact inverse, zeros where a tile overhangs, and the layout that the kernel reads."""

import pytest
import torch

from numba_impl.backends.tiled.weights import pack

CASES = [
    # weight shape, depth, tile_channels
    ((8, 16, 3, 3), 4, 8),
    ((7, 13, 3, 3), 4, 8),
    ((1, 1, 1, 1), 8, 64),
    ((3, 70, 2, 5), 2, 32),
    ((9, 4, 4, 1), 8, 4),
]


def unpack(packed, shape):
    """The inverse of ``pack`` for a weight of ``shape``."""
    c_in, c_out, kh, kw = shape
    flat = packed.permute(1, 0, 3, 2).reshape(packed.shape[1], -1, kh * kw)
    return flat[:c_in, :c_out].reshape(shape)


@pytest.mark.parametrize(("shape", "depth", "tile_channels"), CASES)
def test_unpack_is_the_inverse(shape, depth, tile_channels):
    weight = torch.randn(shape)
    assert torch.equal(unpack(pack(weight, depth, tile_channels), shape), weight)


@pytest.mark.parametrize(("shape", "depth", "tile_channels"), CASES)
def test_layout(shape, depth, tile_channels):
    """[C_out tiles, C_in, taps, tile_channels], contiguous; every value of the weight once, the rest zeros."""
    weight = torch.rand(shape) + 1
    packed = pack(weight, depth, tile_channels)
    c_in, c_out, kh, kw = shape
    assert packed.shape == (-(-c_out // tile_channels), -(-c_in // depth) * depth, kh * kw, tile_channels)
    assert packed.is_contiguous()
    for ci, co, a, b in torch.stack([torch.randint(size, (20,)) for size in shape], 1).tolist():
        assert packed[co // tile_channels, ci, a * kw + b, co % tile_channels] == weight[ci, co, a, b]
    assert packed.count_nonzero() == weight.numel()


def test_any_strides():
    weight = torch.randn(3, 4, 5, 6).transpose(0, 1).flip(2)[:, ::2]
    assert torch.equal(unpack(pack(weight, 4, 8), weight.shape), weight)
