"""The choice of a tile: whatever the problem, one that the kernel can run, and few for each geometry."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from numba_impl.backends.tiled import cost
from tests.cases import BENCHMARK, GPUS, NETWORK_SHAPES, Case, problem
from tests.test_problem import axes

REGISTERS = 65536  # of a multiprocessor


def choose(case, capability=(9, 0), staged=False):
    """The tile for a case on a GPU that need not be here."""
    return cost.choose(case.geometry, problem(case, "cuda").size, GPUS[capability], staged)


def check(tile, geometry, capability=(9, 0)):
    """Assert what the kernel takes for granted of a tile."""
    gpu = GPUS[capability]
    assert tile.threads % 32 == 0, "whole warps"
    assert tile.depth % tile.unroll == 0, "a stage is whole steps"
    assert tile.depth * tile.part(geometry).taps * tile.tile_channels % 4 == 0, "a stage of weights is 16-byte copies"
    assert tile.channels % 4 or tile.tile_channels % 4 == 0, "a thread's weights start at 16 bytes"
    assert tile.threads % tile.depth == 0, "a thread copies one channel of channels_last"
    shared = tile.shared(geometry).bytes
    assert shared <= gpu.shared_per_block
    assert (shared + 1024) * tile.blocks <= gpu.shared_per_multiprocessor
    sums = tile.part(geometry).parities * tile.channels * tile.rows * tile.cols
    assert sums < REGISTERS // (tile.blocks * tile.threads), "the sums stay in registers"


@st.composite
def cases(draw):
    rows, cols = draw(axes(most=300)), draw(axes(most=300))
    shape = draw(st.integers(1, 200)), draw(st.integers(1, 600)), rows[0], cols[0]
    return Case(shape, draw(st.integers(1, 600)), *zip(rows[1:], cols[1:], strict=True))


@pytest.mark.parametrize("capability", GPUS, ids=str)
@pytest.mark.parametrize("case", [BENCHMARK, *NETWORK_SHAPES], ids=str)
def test_real_shapes(case, capability):
    tile = choose(case, capability)
    assert tile is not None
    check(tile, case.geometry, capability)


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("capability", GPUS, ids=str)
@given(case=cases())
def test_drawn_problems(case, capability, staged):
    tile = choose(case, capability, staged)
    if tile is not None:
        check(tile, case.geometry, capability)


@pytest.mark.parametrize(("kernel", "stride"), [(16, 8), (31, 16), (12, 6)])
def test_where_parities_are_many_a_block_has_rows_of_one(kernel, stride):
    """As in FCN-8s, whose straight-line code for all parities would be too long."""
    tile = choose(Case((4, 21, 64, 64), 21, kernel, stride, stride // 2))
    assert tile.row_parity and not choose(Case((4, 56, 256, 256), 1, 9, 3, 4, 2)).row_parity


@pytest.mark.parametrize("channels", [1, 2, 3, 5])
def test_few_output_channels_are_not_padded(channels):
    """A thread of FSRCNN's last layer computed three channels of zeros for each that there is."""
    assert choose(Case((16, 128, 64, 64), channels, 4, 2, 1)).tile_channels == channels


def test_a_kernel_too_large_for_any_tile_is_declined():
    assert choose(Case((1, 8, 64, 64), 8, 31, 1, 0)) is None


@pytest.mark.parametrize("case", [BENCHMARK, *NETWORK_SHAPES], ids=str)
def test_few_tiles_for_a_geometry(case):
    """A network whose image sizes keep changing must not keep compiling."""
    sizes = [(n, case.x[1], h, w) for n in (1, 2, 7, 16, 128) for h in (1, 5, 16, 33, 128) for w in (1, 4, 9, 30, 256)]
    variants = (Case(size, case.out_channels, case.kernel_size, case.stride, case.padding, case.output_padding) for size in sizes)
    assert len({choose(variant) for variant in variants}) <= 6
