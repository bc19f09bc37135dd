"""The plain fp32 unit of the Hopper kernel and of its backward, unit by unit (simulator and GPU): edges, values of every kind."""

import functools

import pytest
import torch
from numba import cuda, int32
from numba.cuda import types

from numba_impl.backends.hopper import exact
from numba_impl.cuda.device import device
from numba_impl.cuda.kernel import Kernel
from numba_impl.epilogue import MISH_ADD_HARDTANH_SCALE, Constants
from numba_impl.oracle import check_epilogue_gradient, check_layer, check_layer_gradient, to_tf32
from tests.backends.values import around_the_bounds
from tests.cases import CLAMPED, MET, OPEN, Case, Guarded, bits

pytestmark = [pytest.mark.gpu, pytest.mark.simulator]

STRIP, THREADS = 4, 8  # the simulator needs a millisecond a thread
# The simulator computes with NumPy, which warns of what the IEEE rules make of infinities.
NUMPY_WARNS = "ignore:.*encountered in scalar:RuntimeWarning"


@functools.cache
def kernel(in_channels, out_channels, tf32, operation):
    """A block computes one unit: (image, row, strip) by its number."""
    compute = exact.build(in_channels, out_channels, STRIP, THREADS, tf32, operation, MISH_ADD_HARDTANH_SCALE)

    @device
    def unit(x, weight, bias, gy, out, strips, sizes, constants):
        thread, block = int32(cuda.threadIdx.x), int32(cuda.blockIdx.x)
        image = int32(block // strips // sizes[0])
        row, cell = int32(block // strips % sizes[0]), int32(block % strips * STRIP)
        compute(thread, x, weight, bias, gy, out, image, row, cell, sizes, constants)

    def forward(x, weight, bias, out, strips, sizes, constants):
        unit(x, weight, bias, (), out, strips, sizes, constants)

    def pre_gradient(x, weight, bias, gy, out, strips, sizes, constants):
        unit(x, weight, bias, (gy,), out, strips, sizes, constants)

    function, arrays = (forward, 4) if operation == "forward" else (pre_gradient, 5)
    f, i = types.CPointer(types.float32), types.int32
    signature = types.void(*[f] * arrays, i, types.UniTuple(i, 4), types.UniTuple(types.float32, 4))
    return Kernel(function, signature, THREADS, 1)


def run(case, x, weight, bias, tf32=False, gy=None, constants=OPEN):
    """Into NaNs between guard zones; gives the output, or with gy the gradient."""
    out = Guarded(case.output_shape, x.device)
    strips = -(-case.x[3] // STRIP)
    sizes = *case.x[2:], *case.output_shape[2:]
    built = kernel(case.x[1], case.out_channels, tf32, "forward" if gy is None else "pre_gradient")
    inputs = [x, weight, bias] if gy is None else [x, weight, bias, gy]
    before = [t.clone() for t in inputs]
    built.prepare(x.device, case.x[0] * case.x[2] * strips, strips, sizes)((*inputs, out.tensor), constants=constants)
    out.check()
    assert all(torch.equal(bits(t), bits(old)) for t, old in zip(inputs, before, strict=True)), "an input was written"
    return out.tensor


def check(case, x, weight, bias, tf32=False):
    y = run(case, x, weight, bias, tf32)
    check_layer(y, x, weight, bias, case.geometry, OPEN, "tf32" if tf32 else "fp32")
    return y


def check_gradient(case, x, weight, bias, tf32=False, constants=OPEN):
    gy = torch.randn(case.output_shape, device=x.device)
    g = run(case, x, weight, bias, tf32, gy, constants)
    check_layer_gradient(g, x, weight, bias, gy, case.geometry, constants, "tf32" if tf32 else "fp32")
    return g


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


@pytest.mark.parametrize("tf32", [False, True], ids=["fp32", "tf32"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradient_at_edges(case, tf32, kernel_device):
    check_gradient(case, *case.draw(kernel_device), tf32)


@pytest.mark.parametrize("constants", [CLAMPED, Constants(0.5, -2.0), Constants(0.0, 1.0, 0.0, 0.25)], ids=str)
def test_gradient_clamped(constants, kernel_device):
    check_gradient(CASES[1], *CASES[1].draw(kernel_device), constants=constants)


def test_no_gradient_exactly_where_the_output_is_at_a_bound(kernel_device):
    """Zero weights, so that the biases, one a channel, are the pre-activations: neighbours about either bound."""
    z = around_the_bounds(MET, 20).to(kernel_device)
    z = z[: len(z) // 8 * 8]
    case = Case((1, 1, 1, 1), len(z), 3, 2, 1, 1)
    x, weight, _ = case.draw(kernel_device)
    gy = torch.ones(case.output_shape, device=kernel_device)
    clamped = run(case, x, 0 * weight, z, constants=MET._replace(scale=1.0))
    g = run(case, x, 0 * weight, z, gy=gy, constants=MET)
    check_epilogue_gradient(g, z.view(1, -1, 1, 1).expand(case.output_shape), gy, clamped, MET)


@pytest.mark.filterwarnings(NUMPY_WARNS)
@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_special_values_of_x(value, kernel_device):
    case = CASES[1]
    x, weight, bias = case.draw(kernel_device)
    x[1, 1, 1, 3] = float(value)
    check(case, x, weight, bias)
    for constants in (OPEN, CLAMPED):
        check_gradient(case, x, weight, bias, constants=constants)


@pytest.mark.filterwarnings(NUMPY_WARNS)
@pytest.mark.parametrize("value", ["nan", "inf"])
def test_a_special_weight_meets_no_pixel_outside_the_image(value, kernel_device):
    case = CASES[1]
    x, weight, bias = case.draw(kernel_device)
    weight[1, 3, 0, 0] = float(value)
    y = check(case, x, weight, bias)
    g = check_gradient(case, x, weight, bias)
    for result in (y, g):
        assert result[:, 3, -1].isfinite().all() and result[:, 3, :, -1].isfinite().all()


def test_any_scale(kernel_device):
    case = CASES[1]
    x, weight, bias = case.draw(kernel_device)
    x *= 10.0 ** (40 * torch.rand_like(x) - 20)
    check(case, x, weight, bias)
    check_gradient(case, x, weight, bias)


def test_tf32_rounds_its_operands(kernel_device):
    case = CASES[0]
    x, weight, bias = case.draw(kernel_device)
    rounded = to_tf32(x), to_tf32(weight)
    assert torch.equal(run(case, x, weight, bias, tf32=True), run(case, *rounded, bias))
    assert not torch.equal(run(case, x, weight, bias, tf32=True), run(case, x, weight, bias))
    gy = torch.randn(case.output_shape, device=kernel_device)
    assert torch.equal(run(case, x, weight, bias, True, gy), run(case, *rounded, bias, False, gy))
