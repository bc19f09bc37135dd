"""The sums of channels: pieces, parts, alignments, special values (simulator and GPU), 2^31 (GPU)."""

import functools

import pytest
import torch

from numba_impl.backends.composite import channel_sum
from numba_impl.oracle import TINY, U
from tests.cases import Guarded, bits

pytestmark = pytest.mark.gpu

# Threads of a block, values of a piece, and blocks, so few that the simulator soon sees several pieces and parts.
FEW = {"THREADS": 4, "PIECE": 64, "BLOCKS": 4}

SHAPES = {
    "one value": (1, 1, 1, 1),
    "odd plane": (3, 2, 5, 7),
    "plane by fours": (2, 1, 4, 7),
    "one piece exactly": (2, 1, 8, 8),
    "a value more": (2, 1, 5, 13),
    "four values more": (2, 1, 4, 17),
    "several pieces, a short one last": (2, 3, 14, 14),
    "several pieces, odd": (2, 3, 13, 15),
    "one image of many channels": (1, 9, 3, 4),
    "more pieces than parts": (5, 3, 9, 23),
    "many images of one pixel": (70, 2, 1, 1),
}


build_small = functools.cache(channel_sum.build.__wrapped__)


@pytest.fixture
def small_pieces(monkeypatch):
    """A kernel of few threads and small pieces: the simulator needs a millisecond a thread."""
    for name, value in FEW.items():
        monkeypatch.setattr(channel_sum, name, value)
    kernel = build_small()
    monkeypatch.setattr(channel_sum, "build", lambda: kernel)


def channel_sum_of(g):
    return channel_sum.prepare(g.device, g.shape, g.dtype)(g)


def check(g):
    """Within a few roundings of the sum of |g|, and g is as it was; gives the sums."""
    before = g.clone()
    sums = channel_sum_of(g)
    assert sums.shape == g.shape[1:2] and sums.dtype == torch.float32 and sums.device == g.device
    assert torch.equal(bits(g), bits(before)), "g was written"
    check_sums(sums, *exact(g))
    return sums


def exact(g):
    """In float64, an image at a time: the sums of each channel, of g and of |g|."""
    sums, sizes = torch.zeros(2, g.shape[1], dtype=torch.float64, device=g.device)
    for image in g:
        sums += image.sum((1, 2), dtype=torch.float64)
        sizes += image.abs().sum((1, 2), dtype=torch.float64)
    return sums, sizes


def check_sums(sums, want, sizes):
    """16 roundings: about one of each level of the tree, and of each thread's own sum, which errs at random."""
    good = torch.where(
        want.isfinite(), (sums - want).abs() <= 16 * U * sizes + TINY, (sums == want) | (sums.isnan() & want.isnan())
    )
    assert good.all(), f"got {sums[~good][:5].tolist()}, want {want[~good][:5].tolist()}"


def guarded(shape, device, offset=0):
    """Drawn values that start ``offset`` values past 16-byte alignment, between zones that would spoil any sum."""
    memory = Guarded(shape, device, offset)
    memory.tensor.normal_()
    return memory.tensor


@pytest.mark.simulator
@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_shapes(shape, kernel_device):
    check(guarded(shape, kernel_device))


@pytest.mark.simulator
@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("offset", [1, 2, 3])
def test_misaligned(offset, kernel_device):
    check(guarded((2, 1, 10, 10), kernel_device, offset))


@pytest.mark.simulator
@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("shape", [(0, 3, 4, 5), (2, 3, 0, 5)], ids=str)
def test_nothing_sums_to_zero(shape, kernel_device):
    assert torch.equal(channel_sum_of(torch.empty(shape, device=kernel_device)), torch.zeros(3, device=kernel_device))


@pytest.mark.simulator
@pytest.mark.usefixtures("small_pieces")
@pytest.mark.filterwarnings("ignore:.*encountered in scalar:RuntimeWarning")  # the simulator computes with NumPy
@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
@pytest.mark.parametrize("place", [(0, 1, 0, 0), (1, 1, 12, 14)], ids=["first", "last"])
def test_special_values_reach_their_own_channel(place, value, kernel_device):
    g = guarded((2, 3, 13, 15), kernel_device)
    g[place] = float(value)
    assert check(g).isfinite().tolist() == [True, False, True]


@pytest.mark.simulator
@pytest.mark.parametrize("shape", [(1, 1, 1, 5), (1, 1, 3, 1376)], ids=str)
def test_as_it_is_built(shape, kernel_device):
    """With its own threads and pieces: less than one piece, and one with a few values more."""
    check(guarded(shape, kernel_device))


@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize(
    "shape",
    [(1, 3, 517, 1031), (16, 64, 128, 256), (300, 5, 33, 37), (2000, 64, 1, 1), (2, 2048, 16, 16), (1, 1, 3000, 3000)],
    ids=str,
)
def test_sizes(shape, offset):
    g = guarded(shape, "cuda", offset)
    assert torch.equal(bits(check(g)), bits(channel_sum_of(g))), "the order of the additions is not fixed"


def test_sums_of_one_sign():
    check(torch.rand(16, 64, 128, 256, device="cuda"))


@pytest.mark.usefixtures("whole_gpu")
@pytest.mark.parametrize("shape", [(3, 2, 20_000, 20_000), (1, 1, 46_400, 46_400)], ids=["in all", "in a plane"])
def test_more_than_2_31_values(shape):
    """9.6 GB."""
    g = torch.empty(shape, device="cuda").normal_()
    check_sums(channel_sum_of(g), *exact(g))
