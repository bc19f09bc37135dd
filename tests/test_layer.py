"""The layer through every backend: geometries, constants, special values, inputs of every kind."""

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn

from model_numba import ModelNumba
from numba_impl import dispatch, mish_add_hardtanh_scale
from numba_impl.epilogue import Constants
from numba_impl.oracle import check_epilogue, check_layer
from tests.cases import (
    NETWORK_SHAPES,
    SIZES,
    USUAL,
    VIEWS,
    Case,
    apply,
    assert_same,
    bits,
    eager,
    every_backend,
    every_device,
    problem,
)
from tests.test_problem import axes

GRID = [
    Case((2, 8, 8, 8), 8, 3, 2, 1, 1),
    Case((3, 5, 7, 9), 13, 3, 2, 1, 1),
    Case((2, 16, 9, 7), 6, 3, 2, 1),
    Case((1, 1, 1, 1), 1, 3, 2, 1, 1),
    Case((1, 1, 1, 1), 1, 1),
    Case((2, 3, 5, 4), 4, 1, 3, 0, 2),
    Case((2, 12, 8, 8), 6, 4, 2, 1),
    Case((2, 12, 9, 5), 6, 2, 2),
    Case((1, 6, 7, 5), 10, 5, 3, 2, 1),
    Case((2, 70, 11, 3), 67, 3, 1, 1),
    Case((1, 4, 6, 6), 3, 7, 4, 2, 3),
    Case((2, 4, 6, 5), 3, (1, 3), (2, 1), (0, 1), (1, 0)),
    Case((2, 4, 6, 5), 3, (4, 5), (2, 3), (1, 2), (1, 0)),
    Case((2, 4, 8, 9), 3, 3, 2, 4),
    Case((0, 4, 6, 5), 3, 3, 2, 1, 1),
    Case((2, 8, 8, 8), 8, 3, 2, 1, 1, bias=False),
]


def check(case, device, backend, add_value=-0.5, scale=2.0):
    """Run a case and compare with float64; a forced backend may decline it, but then says so."""
    x, weight, bias = case.draw(device)
    try:
        y = apply(x, weight, bias, case, add_value, scale, backend=backend)
    except ValueError as error:
        assert backend == "tiled" and "cannot serve" in str(error)
        assert dispatch.BACKENDS[backend].why_not(problem(case, x.device))
        return
    check_layer(y, x, weight, bias, case.geometry, Constants(add_value, scale))


@every_backend
@pytest.mark.parametrize("add_value", [0.5, -0.5])
@pytest.mark.parametrize("case", GRID, ids=str)
def test_grid(case, add_value, device, backend):
    check(case, device, backend, add_value)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["tiled", "composite", None])
@pytest.mark.parametrize("case", NETWORK_SHAPES, ids=str)
def test_network_shapes(case, backend):
    check(case, "cuda", backend)


@st.composite
def cases(draw):
    rows, cols = draw(axes()), draw(axes())
    shape = draw(st.integers(0, 3)), draw(st.integers(1, 20)), rows[0], cols[0]
    geometry = zip(rows[1:], cols[1:], strict=True)
    return Case(shape, draw(st.integers(1, 20)), *geometry, bias=draw(st.booleans()))


@settings(max_examples=25)
@given(case=cases(), seed=st.integers(0, 2**32 - 1))
def test_drawn_geometries(case, seed):
    for backend in ("reference", None):
        torch.manual_seed(seed)
        check(case, "cpu", backend)


@pytest.mark.gpu
@settings(max_examples=12)
@given(case=cases(), seed=st.integers(0, 2**32 - 1))
def test_drawn_geometries_on_a_gpu(case, seed):
    """Each compiles a kernel, so they are few, and their kernels small."""
    assume(case.geometry.taps <= 16)
    for backend in ("tiled", "composite", None):
        torch.manual_seed(seed)
        check(case, "cuda", backend)


@every_backend
@pytest.mark.parametrize(("add_value", "scale"), [(-2.0, 2), (0, 1), (0.0, -1.5), (0.9, 0.25), (3, 0), (-0.7, 1e-3)])
def test_constants(add_value, scale, device, backend):
    check(USUAL, device, backend, add_value, scale)


def test_the_lower_clamp_fires():
    """Mish is never below -0.31, so with add_value 0.5 nothing reaches -1; these tests use values that do."""
    x, weight, bias = USUAL.draw()
    assert (apply(x, weight, bias, USUAL, -0.9, 1.0) == -1).any()
    assert (apply(x, weight, bias, USUAL, 0.5, 1.0) > -1).all()


@every_backend
def test_zero_weight_leaves_the_bias(device, backend):
    """Every output is the epilogue of its channel's bias, swept where mish, exp and the clamps do their worst."""
    sweep = torch.cat([torch.linspace(-30, 100, 1301), torch.tensor([-104.0, -88.0, 88.0, 1e4, 1e30])]).to(device)
    case = Case((1, 3, 2, 2), len(sweep), 3, 2, 1, 1)
    x, weight, _ = case.draw(device)
    y = apply(x, torch.zeros_like(weight), sweep, case, -0.25, 1.0, backend=backend)
    check_epilogue(y, sweep.view(1, -1, 1, 1).expand(y.shape), Constants(-0.25, 1.0))


@every_backend
def test_zero_bias(device, backend):
    x, weight, bias = USUAL.draw(device)
    y = apply(x, weight, torch.zeros_like(bias), USUAL, backend=backend)
    assert_same(y, apply(x, weight, None, USUAL, backend=backend))
    check_layer(y, x, weight, None, USUAL.geometry, Constants(-0.5, 2.0))


@every_backend
@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_special_values_come_out_as_in_torch(value, device, backend):
    x, weight, bias = USUAL.draw(device)
    x[0, 1, 3, 4] = float(value)
    bias[2] = float(value)
    y = apply(x, weight, bias, USUAL, backend=backend)
    assert y.isnan().any()
    served_by, _ = dispatch.choose(problem(USUAL, x.device), backend)
    if device == "cuda" and served_by != "tiled":  # where cuDNN spreads a NaN is torch's affair
        want = apply(x, weight, bias, USUAL, backend="reference")
        torch.testing.assert_close(y, want, rtol=1e-5, atol=1e-5, equal_nan=True)
    else:
        check_layer(y, x, weight, bias, USUAL.geometry, Constants(-0.5, 2.0))


@every_backend
@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_any_strides_and_never_modified(view, device, backend):
    x, weight, bias = USUAL.draw(device)
    x = view(x)
    weight = torch.empty(weight.transpose(0, 3).shape, device=device).transpose(0, 3).copy_(weight)  # strides of its own
    inputs = x, weight, bias
    before, versions = [bits(t).clone() for t in inputs], [t._version for t in inputs]
    y = apply(x, weight, bias, USUAL, backend=backend)
    assert all(torch.equal(bits(t), b) for t, b in zip(inputs, before, strict=True))
    assert [t._version for t in inputs] == versions
    assert all(y.untyped_storage().data_ptr() != t.untyped_storage().data_ptr() for t in inputs)
    check_layer(y, *inputs, USUAL.geometry, Constants(-0.5, 2.0))


@every_backend
def test_unbatched(device, backend):
    x, weight, bias = USUAL.draw(device)
    y = apply(x[0], weight, bias, USUAL, backend=backend)
    assert y.shape == USUAL.output_shape[1:]
    check_layer(y[None], x[:1], weight, bias, USUAL.geometry, Constants(-0.5, 2.0))


@every_device
def test_float64_is_torchs(device):
    module = nn.ConvTranspose2d(**SIZES, device=device, dtype=torch.float64)
    x = torch.randn(2, 6, 7, 9, device=device, dtype=torch.float64)
    with torch.no_grad():
        assert_same(ModelNumba.from_conv(module, -0.5, 2.0)(x), eager(x, module))


@every_backend
def test_tensors_that_torch_negates_later(device, backend):
    """As the imaginary part of a conjugate is: another sign in memory than it has. Also the gradient at the output."""
    x, weight, bias = (torch.complex(t, t).conj().imag.requires_grad_() for t in USUAL.draw(device))
    assert x.is_neg() and weight.is_neg() and bias.is_neg()
    y = apply(x, weight, bias, USUAL, backend=backend)
    check_layer(y, x, weight, bias, USUAL.geometry, Constants(-0.5, 2.0))
    gy = torch.complex(y, y).detach().conj().imag
    leaves, plain = (x, weight, bias), [t.detach().resolve_neg().requires_grad_() for t in (x, weight, bias)]
    want = torch.autograd.grad(apply(*plain, USUAL, backend=backend), plain, gy.resolve_neg())
    torch.testing.assert_close(torch.autograd.grad(y, leaves, gy), want, rtol=1e-4, atol=1e-4)


@every_device
def test_the_epilogue_of_a_tensor_that_torch_negates_later(device):
    x = torch.randn(3, 5, dtype=torch.complex64, device=device).conj().imag
    check_epilogue(mish_add_hardtanh_scale(x, -0.5, 2.0), x.resolve_neg(), Constants(-0.5, 2.0))
