"""The epilogue's kernel and its gradient's: sizes, alignments, special values, the clamp (simulator and GPU), 2^31 (GPU)."""

import itertools

import pytest
import torch

from numba_impl.backends.base import DTYPES
from numba_impl.backends.composite import elementwise
from numba_impl.cuda.device import SIMULATED
from numba_impl.epilogue import MISH_ADD_HARDTANH_SCALE, Constants
from numba_impl.oracle import BARE, check_epilogue, check_epilogue_gradient
from tests.backends.composite.conftest import small
from tests.backends.values import CONSTANTS, SPECIAL, around_the_bounds, every_exponent, special_pairs
from tests.cases import CLAMPED, OPEN, Guarded, bits
from tests.cuda.intrinsics import NUMPY_WARNS, every_16_bits

pytestmark = pytest.mark.gpu

NARROW = [dtype for dtype in DTYPES if dtype.itemsize == 2]
numpy_warns = pytest.mark.filterwarnings(NUMPY_WARNS)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
# (dtype, source's offset, target's): misaligned alike and differently. Those of 16 bits differ in their conversions alone.
OFFSETS = [(torch.float32, *pair) for pair in itertools.product(range(4), repeat=2)]
OFFSETS += [(torch.bfloat16, *pair) for pair in [*((n, n) for n in range(8)), (0, 1), (2, 0), (3, 7), (5, 4)]]


def run(operation, source, target, constants):
    """The target of the kernel, which gives it and writes no other array."""
    before = source.clone()
    run = elementwise.prepare(operation, MISH_ADD_HARDTANH_SCALE, target.device, target.shape, target.dtype)
    assert run(source, target, constants) is target
    assert source is target or torch.equal(bits(source), bits(before)), "the input was written"
    return target


def check(x, constants, offset=0):
    """Out of place, and nothing but ``y`` is written."""
    out = Guarded(x.shape, x.device, offset, dtype=x.dtype)
    run("activate", x, out.tensor, constants)
    out.check()
    check_epilogue(out.tensor, x, constants)


def check_inplace(x, constants, offset=0):
    """In place, and nothing around is written."""
    memory = Guarded.of(x, offset)
    run("activate", memory.tensor, memory.tensor, constants)
    memory.check()
    check_epilogue(memory.tensor, x, constants)


def check_gradient(z, gy, constants, offset=0):
    """In place of z, and nothing else is written."""
    memory = Guarded.of(z, offset)
    run("pre_gradient", gy, memory.tensor, constants)
    memory.check()
    check_epilogue_gradient(memory.tensor, z, gy, clamped(z, constants), constants)


def clamped(z, constants):
    """The forward in fp32 with scale 1, which shows where the output stands at a bound."""
    return run("activate", z.float(), torch.empty_like(z, dtype=torch.float32), constants._replace(scale=1.0))


def shifted(x, offset):
    """A copy of x that starts ``offset`` values past 16-byte alignment."""
    return x.new_empty(x.numel() + offset)[offset:].copy_(x)


def draw(size, device, dtype=torch.float32):
    return (3 * torch.randn(size, device=device)).to(dtype), torch.randn(size, device=device).to(dtype)


@small
@every_dtype
@pytest.mark.parametrize("size", [0, 1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 1003])
def test_sizes(size, dtype, kernel_device):
    z, gy = draw(size, kernel_device, dtype)
    check(z, OPEN)
    check_inplace(z, OPEN)
    check_gradient(z, gy, OPEN)


@small
@pytest.mark.parametrize(("dtype", "source_offset", "target_offset"), OFFSETS, ids=str)
@pytest.mark.parametrize("size", [1, 2, 37])
def test_alignments(size, dtype, source_offset, target_offset, kernel_device):
    z, gy = draw(size, kernel_device, dtype)
    check(shifted(z, source_offset), OPEN, target_offset)
    check_gradient(z, shifted(gy, source_offset), OPEN, target_offset)


@small
@pytest.mark.parametrize(("dtype", "offset"), [(dtype, target) for dtype, source, target in OFFSETS if source == target], ids=str)
def test_alignments_inplace(dtype, offset, kernel_device):
    check_inplace(draw(37, kernel_device, dtype)[0], OPEN, offset)


@pytest.mark.simulator
@every_dtype
def test_vectors_are_aligned_and_as_many_as_can_be(dtype):
    """Which the simulator does not mind."""
    vector, addresses = 16 // dtype.itemsize, range(0, 32, dtype.itemsize)
    for size, source, target in itertools.product(range(3 * vector), addresses, addresses):
        first, end = elementwise.vector_range(size, vector, source, target)
        assert 0 <= first <= end <= size and (end - first) % vector == 0
        if first < end:
            assert (source + first * dtype.itemsize) % 16 == (target + first * dtype.itemsize) % 16 == 0
        if (source - target) % 16 == 0 and size >= vector:
            assert first < vector and (size - end < vector or first == size)
        else:
            assert first == end


@small
def test_dense_in_another_order(kernel_device):
    z, gy, y = torch.randn(3, 2, 3, 4, 5, device=kernel_device).to(memory_format=torch.channels_last_3d).unbind(0)
    assert not z.is_contiguous() and z.stride() == gy.stride()
    g = z.clone()
    run("activate", z, y, OPEN)
    check_epilogue(y, z, OPEN)
    run("pre_gradient", gy, g, OPEN)
    check_epilogue_gradient(g, z, gy, y, OPEN)


@small
@numpy_warns
@pytest.mark.parametrize(
    "constants",
    [
        *(CLAMPED, OPEN, Constants(0.5, 2.0), Constants(-2.0, 2.0), Constants(0.0, 1.0), Constants(-0.0, -1.0)),
        *(Constants(0.25, 3.0, 0.0, 0.0), Constants(1e-30, 1e-8, -1e-30, 1e30)),
        BARE,
    ],
    ids=str,
)
def test_special_values(constants, kernel_device):
    values = torch.tensor(SPECIAL, device=kernel_device)
    x = torch.cat([values, -values])
    check(x, constants)
    check_inplace(x, constants)


@small
@numpy_warns
@pytest.mark.parametrize("constants", CONSTANTS, ids=str)
def test_gradient_of_special_values(constants, kernel_device):
    check_gradient(*special_pairs(kernel_device), constants)


@small
@numpy_warns
@pytest.mark.parametrize("constants", [BARE, CLAMPED, Constants(-2.0, 2.0)], ids=str)
@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_special_values_of_16_bits(dtype, constants, kernel_device):
    z, gy = (t.to(dtype) for t in special_pairs(kernel_device))
    x = z.unique()
    check(x, constants)
    check_inplace(x, constants)
    check_gradient(z, gy, constants)


@small
@every_dtype
def test_gradient_clamped(dtype, kernel_device):
    check_gradient(*draw(203, kernel_device, dtype), CLAMPED)


@small
@pytest.mark.parametrize("constants", CONSTANTS, ids=str)
def test_gradient_at_the_clamps_bounds(constants, kernel_device):
    """Neighbouring z about a bound: no gradient exactly where the forward's output stands at it."""
    z = around_the_bounds(constants, 100 if kernel_device == "cpu" else 100_000).to(kernel_device)
    check_gradient(z, torch.ones_like(z), constants)


@small
@numpy_warns
def test_every_exponent(kernel_device):
    """Through a clamp that hides nothing."""
    z = every_exponent(kernel_device)
    check(z, BARE)
    check_gradient(z, torch.ones_like(z), BARE)


@small
@numpy_warns
@pytest.mark.parametrize("constants", [BARE, OPEN, CLAMPED], ids=str)
@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_every_value_of_16_bits(dtype, constants, kernel_device):
    """Some of them in the simulator."""
    z = every_16_bits()[: 1024 if SIMULATED else None].view(dtype).to(kernel_device)
    check(z, constants)
    check_gradient(z, torch.ones_like(z), constants)


@every_dtype
@pytest.mark.parametrize("size", [1_000_003, 2**25 + 1])
def test_large_sizes(size, dtype):
    x = 5 * torch.randn(size, device="cuda").to(dtype)
    check(x, CLAMPED)
    check_inplace(x, CLAMPED)


@every_dtype
@pytest.mark.parametrize("constants", [BARE, CLAMPED], ids=str)
def test_gradient_of_large_sizes(constants, dtype):
    check_gradient(*draw(2**22 + 3, "cuda", dtype), constants)


@pytest.mark.usefixtures("whole_gpu")
@pytest.mark.parametrize("offset", [0, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_more_than_2_31_values(dtype, offset):
    """In place, 8.8 GB: both ends, both sides of 2^31 and of 2^31 bytes, and drawn places in between."""
    size, width = 2_200_000_003, 100_000
    memory = Guarded((size,), "cuda", offset, dtype=dtype)
    x = memory.tensor
    block = 3 * torch.randn(1_000_003, device="cuda").to(dtype)
    repeat(block, x)
    starts = [
        0,
        2**31 // dtype.itemsize - width // 2,
        2**31 - width // 2,
        size - width,
        *torch.randint(size - width, (20,)).tolist(),
    ]
    before = [x[start : start + width].clone() for start in starts]
    elementwise.prepare("activate", MISH_ADD_HARDTANH_SCALE, x.device, x.shape, x.dtype)(x, x, OPEN)
    memory.check()
    for start, v in zip(starts, before, strict=True):
        check_epilogue(x[start : start + width], v, OPEN)
    assert_repeats(x, len(block))


@pytest.mark.usefixtures("whole_gpu")
@pytest.mark.parametrize("offset", [0, 3])
def test_gradient_of_more_than_2_31_values(offset):
    """In place of z, 17.6 GB."""
    size = 2_200_000_003
    memory, gy = Guarded((size,), "cuda", offset), torch.empty(size + offset, device="cuda")[offset:]
    block_z, block_gy = draw(1_000_003, "cuda")
    repeat(block_z, memory.tensor)
    repeat(block_gy, gy)
    elementwise.prepare("pre_gradient", MISH_ADD_HARDTANH_SCALE, gy.device, gy.shape, gy.dtype)(gy, memory.tensor, OPEN)
    memory.check()
    check_epilogue_gradient(memory.tensor[: len(block_z)], block_z, block_gy, clamped(block_z, OPEN), OPEN)
    assert_repeats(memory.tensor, len(block_z))


def repeat(block, x):
    """Fill x with copies of a block, the last of them a piece."""
    for part in x.split(len(block)):
        part.copy_(block[: len(part)])


def assert_repeats(x, length):
    """A value's result depends on the value alone: every block must have come out as the first."""
    first = x[:length].clone()
    for part in x.split(length):
        assert torch.equal(part, first[: len(part)])
