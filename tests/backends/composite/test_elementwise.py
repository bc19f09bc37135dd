"""The pointwise kernel, through its launcher: sizes, alignments, special values (simulator and GPU), 2^31 (GPU)."""

import pytest
import torch

from numba_impl.backends.composite import elementwise as pointwise
from numba_impl.backends.composite.elementwise import Config
from numba_impl.problem import Constants
from tests.accuracy import check_epilogue
from tests.cases import CLAMPED, OPEN, Guarded

pytestmark = pytest.mark.gpu

FEW = Config(threads=8, blocks=2)  # the simulator needs a millisecond a thread; the loops run many times
# The simulator computes with NumPy, which warns of what the IEEE rules make of infinities.
NUMPY_WARNS = "ignore:.*encountered in scalar:RuntimeWarning"
SPECIAL = [
    *(0.0, 1e-45, 1e-40, 2.0**-126, 1e-30, 1e-8, 1.0, 19.999998, 20.0, 20.000002, 44.0, 87.0, 88.0, 88.8, 89.0),
    *(103.9, 104.0, 127.0, 150.0, 1e4, 1e30, 3.4e38, float("inf"), float("nan")),
]


def run(x, y, constants, config=FEW):
    pointwise.launch(x, y, *constants, config)


def check(x, constants, config=FEW, offset=0):
    """Out of place, and nothing but ``y`` is written."""
    before, out = x.clone(), Guarded(x.shape, x.device, offset)
    run(x, out.tensor, constants, config)
    out.check()
    assert torch.equal(x.view(torch.int32), before.view(torch.int32)), "the input was written"
    check_epilogue(out.tensor, x, constants)


def check_inplace(x, constants, config=FEW, offset=0):
    """In place, and nothing around is written."""
    memory = Guarded(x.shape, x.device, offset)
    memory.tensor.copy_(x)
    run(memory.tensor, memory.tensor, constants, config)
    memory.check()
    check_epilogue(memory.tensor, x, constants)


def shifted(x, offset):
    """A copy of x that starts ``offset`` values past 16-byte alignment."""
    return torch.empty(x.numel() + offset, device=x.device)[offset:].copy_(x)


@pytest.mark.simulator
@pytest.mark.parametrize("checks", [check, check_inplace])
@pytest.mark.parametrize("size", [0, 1, 2, 3, 4, 5, 7, 8, 1003])
def test_sizes(size, checks, kernel_device):
    checks(3 * torch.randn(size, device=kernel_device), OPEN)


@pytest.mark.simulator
@pytest.mark.parametrize("y_offset", [0, 1, 2, 3])
@pytest.mark.parametrize("x_offset", [0, 1, 2, 3])
@pytest.mark.parametrize("size", [1, 2, 37])
def test_alignments(size, x_offset, y_offset, kernel_device):
    x = shifted(3 * torch.randn(size, device=kernel_device), x_offset)
    check(x, OPEN, offset=y_offset)


@pytest.mark.simulator
@pytest.mark.parametrize("offset", [1, 2, 3])
def test_alignments_inplace(offset, kernel_device):
    check_inplace(3 * torch.randn(37, device=kernel_device), OPEN, offset=offset)


@pytest.mark.simulator
def test_dense_in_another_order(kernel_device):
    x = torch.randn(2, 3, 4, 5, device=kernel_device).to(memory_format=torch.channels_last)
    y = torch.empty_like(x)
    run(x, y, OPEN)
    check_epilogue(y, x, OPEN)


@pytest.mark.simulator
@pytest.mark.filterwarnings(NUMPY_WARNS)
@pytest.mark.parametrize(
    "constants",
    [
        *(CLAMPED, OPEN, Constants(0.5, 2.0), Constants(-2.0, 2.0), Constants(0.0, 1.0), Constants(-0.0, -1.0)),
        *(Constants(0.25, 3.0, 0.0, 0.0), Constants(1e-30, 1e-8, -1e-30, 1e30)),
        Constants(0.0, 1.0, float("-inf"), float("inf")),
    ],
    ids=str,
)
def test_special_values(constants, kernel_device):
    values = torch.tensor(SPECIAL, device=kernel_device)
    x = torch.cat([values, -values])
    check(x, constants)
    check_inplace(x, constants)


@pytest.mark.simulator
@pytest.mark.filterwarnings(NUMPY_WARNS)
def test_every_exponent(kernel_device):
    """All signs and exponents with drawn mantissas, through a clamp that hides nothing."""
    bits = torch.arange(512, device=kernel_device) << 23 | torch.randint(2**23, (512,), device=kernel_device)
    check(bits.to(torch.int32).view(torch.float32), Constants(0.0, 1.0, float("-inf"), float("inf")))


@pytest.mark.parametrize("checks", [check, check_inplace])
@pytest.mark.parametrize("size", [1_000_003, 2**25 + 1])
def test_large_sizes(size, checks):
    checks(5 * torch.randn(size, device="cuda"), CLAMPED, Config())


@pytest.mark.usefixtures("whole_gpu")
@pytest.mark.parametrize("offset", [0, 3])
def test_more_than_2_31_values(offset):
    """In place, 8.8 GB: both ends, both sides of 2^31 and of 2^31 bytes, and drawn places in between."""
    size, width = 2_200_000_003, 100_000
    memory = Guarded((size,), "cuda", offset)
    x = memory.tensor
    block = 3 * torch.randn(1_000_003, device="cuda")
    for part in x.split(len(block)):
        part.copy_(block[: len(part)])
    starts = [0, 2**29 - width // 2, 2**31 - width // 2, size - width, *torch.randint(size - width, (20,)).tolist()]
    before = [x[start : start + width].clone() for start in starts]
    run(x, x, OPEN, Config())
    memory.check()
    for start, v in zip(starts, before, strict=True):
        check_epilogue(x[start : start + width], v, OPEN)
    # A value's result depends on the value alone: every block must come out as the first.
    first = x[: len(block)].clone()
    for part in x.split(len(block)):
        assert torch.equal(part, first[: len(part)])
