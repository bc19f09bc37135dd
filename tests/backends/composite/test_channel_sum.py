"""The sums of channels: pieces, parts, alignments, special values (simulator and GPU), 2^31 (GPU)."""

import itertools

import pytest
import torch

from numba_impl.backends.base import DTYPES
from numba_impl.backends.composite import channel_sum
from numba_impl.cuda import kernel
from numba_impl.oracle import TINY, U
from tests.cases import Guarded, bits
from tests.cuda.intrinsics import NUMPY_WARNS

pytestmark = pytest.mark.gpu

BOTH = [torch.float32, torch.bfloat16]  # fp16 differs from bf16 in its conversion alone
OFFSETS = [(dtype, offset) for dtype in BOTH for offset in range(1, 16 // dtype.itemsize)]
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
every_size = pytest.mark.parametrize("dtype", BOTH, ids=str)

SHAPES = {
    "one value": (1, 1, 1, 1),
    "odd plane": (3, 2, 5, 7),
    "plane by fours": (2, 1, 4, 7),
    "plane by eights": (2, 1, 8, 5),
    "one piece exactly": (2, 1, 8, 8),
    "a value more": (2, 1, 5, 13),
    "four values more": (2, 1, 4, 17),
    "eight values more": (2, 1, 8, 9),
    "several pieces, a short one last": (2, 3, 14, 14),
    "several pieces, odd": (2, 3, 13, 15),
    "one image of many channels": (1, 9, 3, 4),
    "more pieces than parts": (5, 3, 9, 23),
    "many images of one pixel": (70, 2, 1, 1),
}


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


def guarded(shape, device, dtype, offset=0):
    """Drawn values that start ``offset`` values past 16-byte alignment, between zones that would spoil any sum."""
    memory = Guarded(shape, device, offset, dtype=dtype)
    memory.tensor.normal_()
    return memory.tensor


@pytest.mark.simulator
@pytest.mark.usefixtures("small_pieces")
@every_size
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_shapes(shape, dtype, kernel_device):
    check(guarded(shape, kernel_device, dtype))


@pytest.mark.simulator
@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize(("dtype", "offset"), OFFSETS, ids=str)
def test_misaligned(dtype, offset, kernel_device):
    check(guarded((2, 1, 8, 10), kernel_device, dtype, offset))


@pytest.mark.simulator
@every_dtype
def test_vectors_are_aligned(dtype, kernel_device, monkeypatch):
    """In every plane, which the simulator does not mind."""
    found, vector = [], 16 // dtype.itemsize
    monkeypatch.setattr(kernel.Launch, "__call__", lambda launch, arrays, numbers: found.append(numbers))
    for width, offset in itertools.product(range(1, 3 * vector), range(vector)):
        channel_sum_of(guarded((2, 3, 1, width), kernel_device, dtype, offset))
        assert found.pop() == (width % vector == offset == 0,)


@pytest.mark.simulator
@pytest.mark.usefixtures("small_pieces")
@every_size
@pytest.mark.parametrize("shape", [(0, 3, 4, 5), (2, 3, 0, 5)], ids=str)
def test_nothing_sums_to_zero(shape, dtype, kernel_device):
    sums = channel_sum_of(torch.empty(shape, device=kernel_device, dtype=dtype))
    assert sums.dtype == torch.float32 and torch.equal(sums, torch.zeros(3, device=kernel_device))


@pytest.mark.simulator
@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize(("dtype", "value", "plane"), [(torch.bfloat16, 1 + 2**-7, 1025), (torch.float16, 40_000, 3)], ids=str)
def test_sums_that_16_bits_do_not_hold(dtype, value, plane, kernel_device):
    """They are fp32's, and exact here: bf16 would stop at some power of 2, fp16 is infinite."""
    g = torch.full((2, 3, 1, plane), value, dtype=dtype, device=kernel_device)
    assert channel_sum_of(g).tolist() == [2 * plane * value] * 3


@pytest.mark.simulator
@pytest.mark.usefixtures("small_pieces")
@pytest.mark.filterwarnings(NUMPY_WARNS)
@every_size
@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
@pytest.mark.parametrize("place", [(0, 1, 0, 0), (1, 1, 12, 14)], ids=["first", "last"])
def test_special_values_reach_their_own_channel(place, value, dtype, kernel_device):
    g = guarded((2, 3, 13, 15), kernel_device, dtype)
    g[place] = float(value)
    assert check(g).isfinite().tolist() == [True, False, True]


@pytest.mark.simulator
@every_size
@pytest.mark.parametrize("shape", [(1, 1, 1, 5), (1, 1, 3, 1376)], ids=str)
def test_as_it_is_built(shape, dtype, kernel_device):
    """With its own threads and pieces: less than one piece, and one with a few values more."""
    check(guarded(shape, kernel_device, dtype))


@every_dtype
@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize(
    "shape",
    [(1, 3, 517, 1031), (16, 64, 128, 256), (300, 5, 33, 37), (2000, 64, 1, 1), (2, 2048, 16, 16), (1, 1, 3000, 3000)],
    ids=str,
)
def test_sizes(shape, offset, dtype):
    g = guarded(shape, "cuda", dtype, offset)
    assert torch.equal(bits(check(g)), bits(channel_sum_of(g))), "the order of the additions is not fixed"


@every_dtype
def test_sums_of_one_sign(dtype):
    check(torch.rand(16, 64, 128, 256, device="cuda").to(dtype))


@pytest.mark.usefixtures("whole_gpu")
@every_size
@pytest.mark.parametrize("shape", [(3, 2, 20_000, 20_000), (1, 1, 46_400, 46_400)], ids=["in all", "in a plane"])
def test_more_than_2_31_values(shape, dtype):
    """9.6 GB."""
    g = torch.empty(shape, device="cuda", dtype=dtype).normal_()
    check_sums(channel_sum_of(g), *exact(g))
