"""Packed weights: every value where the kernel reads it, zeros where a tile, stage or parity overhangs (simulator and GPU)."""

import pytest
import torch

from numba_impl.backends.tiled.tile import Tile
from numba_impl.backends.tiled.weights import packer
from tests.cases import Case, problem

WHOLE, APART = (Tile(4, 1, 4, 2, depth=4, row_groups=1, col_groups=1, row_parity=apart) for apart in (False, True))
CASES = [
    (Case((1, 8, 2, 2), 16, 3, 2, 1, 1), WHOLE),
    (Case((1, 7, 2, 2), 13, 3, 2, 1, 1), WHOLE),
    (Case((1, 1, 1, 1), 1, 1), WHOLE),
    (Case((1, 3, 2, 2), 9, (2, 5), (1, 2)), WHOLE),
    (Case((1, 5, 2, 2), 4, 6, 3, 2, 1), APART),
    (Case((1, 3, 2, 2), 9, (5, 2), (3, 1), (1, 0)), APART),
    (Case((1, 3, 2, 2), 5, 2, 3, 0, 2), APART),
]
pytestmark = [pytest.mark.gpu, pytest.mark.simulator]


def expected(weight, case, tile):
    """By the algebra of ``problem``, one value after another."""
    rows, (c_in, c_out, kh, kw) = case.geometry.rows, weight.shape
    parities, taps = tile.row_parities(case.geometry), tile.part(case.geometry).taps
    depth, tiles = -(-c_in // tile.depth) * tile.depth, -(-c_out // tile.tile_channels)
    packed = torch.zeros(parities, tiles, depth, taps, tile.tile_channels)
    for k in range(kh):
        parity, row = (rows.parities[k], rows.parities[:k].count(rows.parities[k])) if tile.row_parity else (0, k)
        for o in range(c_out):
            at = row * kw
            packed[parity, o // tile.tile_channels, :c_in, at : at + kw, o % tile.tile_channels] = weight[:, o, k]
    return packed


@pytest.mark.parametrize(("case", "tile"), CASES, ids=str)
def test_every_value_has_its_place(case, tile, kernel_device):
    weight = torch.randn(case.weight_shape)
    packed = packer(problem(case, kernel_device), tile)(weight.to(kernel_device))
    assert torch.equal(packed.cpu(), expected(weight, case, tile))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_rounded_and_of_any_strides(dtype, kernel_device):
    case, tile = CASES[1]
    for weight in torch.randn(13, 7, 3, 3).transpose(0, 1), torch.randn(case.weight_shape).to(memory_format=torch.channels_last):
        described = problem(case, kernel_device, autocast=dtype)
        packed = packer(described, tile)(weight.to(kernel_device))
        assert torch.equal(packed.cpu(), expected(weight.to(dtype).float(), case, tile))
