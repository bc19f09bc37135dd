"""The plain fp32 unit of the Hopper kernel alone, unit by unit (simulator and GPU): edges, and values of every kind."""

import pytest
import torch
from numba import cuda, int32
from numba.cuda import types

from numba_impl.kernels import plain
from numba_impl.launch import Kernel
from tests.accuracy import check_layer, to_tf32
from tests.cases import OPEN, Case, Guarded

pytestmark = [pytest.mark.gpu, pytest.mark.simulator]

STRIP, THREADS = 4, 8  # the simulator needs a millisecond a thread
# The simulator computes with NumPy, which warns of what the IEEE rules make of infinities.
NUMPY_WARNS = "ignore:.*encountered in scalar:RuntimeWarning"


def kernel(in_channels, out_channels, tf32):
    """A block computes one unit: (image, row, strip) by its number."""
    compute = plain.build(in_channels, out_channels, STRIP, THREADS, tf32)

    def units(x, weight, bias, out, strips, sizes, constants):
        block = int32(cuda.blockIdx.x)
        row, cell = int32(block // strips % sizes[0]), int32(block % strips * STRIP)
        compute(int32(cuda.threadIdx.x), x, weight, bias, out, int32(block // strips // sizes[0]), row, cell, sizes, constants)

    f, i = types.CPointer(types.float32), types.int32
    signature = types.void(f, f, f, f, i, types.UniTuple(i, 4), types.UniTuple(types.float32, 4))
    return Kernel(units, signature, THREADS, 1)


def run(case, x, weight, bias, tf32=False):
    out = Guarded(case.output_shape, x.device)
    strips = -(-case.x[3] // STRIP)
    sizes = *case.x[2:], *case.output_shape[2:]
    launch = kernel(case.x[1], case.out_channels, tf32)
    launch(case.x[0] * case.x[2] * strips, x, weight, bias, out.tensor, strips, sizes, tuple(OPEN))
    out.check()
    return out.tensor


def check(case, x, weight, bias, tf32=False):
    y = run(case, x, weight, bias, tf32)
    check_layer(y, x, weight, bias, case.geometry, OPEN, "tf32" if tf32 else "fp32")
    return y


CASES = [
    Case((1, 3, 2, 4), 8, 3, 2, 1, 1),
    Case((2, 2, 3, 5), 24, 3, 2, 1, 1),
    Case((1, 8, 1, 1), 16, 3, 2, 1),
    Case((1, 2, 2, 7), 8, 3, 2, 1, (0, 1)),
    Case((1, 2, 3, 4), 8, 3, 2, 1, (1, 0)),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_edges(case, kernel_device):
    check(case, *case.draw(kernel_device))


@pytest.mark.filterwarnings(NUMPY_WARNS)
@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_special_values_of_x(value, kernel_device):
    case = CASES[1]
    x, weight, bias = case.draw(kernel_device)
    x[1, 1, 1, 3] = float(value)
    check(case, x, weight, bias)


@pytest.mark.filterwarnings(NUMPY_WARNS)
@pytest.mark.parametrize("value", ["nan", "inf"])
def test_a_special_weight_meets_no_pixel_outside_the_image(value, kernel_device):
    case = CASES[1]
    x, weight, bias = case.draw(kernel_device)
    weight[1, 3, 0, 0] = float(value)
    y = check(case, x, weight, bias)
    assert y[:, 3, -1].isfinite().all() and y[:, 3, :, -1].isfinite().all()


def test_any_scale(kernel_device):
    case = CASES[1]
    x, weight, bias = case.draw(kernel_device)
    check(case, x * 10.0 ** (40 * torch.rand_like(x) - 20), weight, bias)


def test_tf32_rounds_its_operands(kernel_device):
    case = CASES[0]
    x, weight, bias = case.draw(kernel_device)
    rounded = to_tf32(x), to_tf32(weight)
    assert torch.equal(run(case, x, weight, bias, tf32=True), run(case, *rounded, bias))
    assert not torch.equal(run(case, x, weight, bias, tf32=True), run(case, x, weight, bias))
