"""The composite's plans of every operation, beside plain PyTorch (simulator and GPU); what it declines."""

from dataclasses import replace

import pytest
import torch

from numba_impl import arguments, convolution, gpu
from numba_impl.arguments import kind
from numba_impl.backends.base import DTYPES
from numba_impl.backends.composite import backend
from numba_impl.backends.reference import plan as reference
from numba_impl.epilogue import MISH_ADD_HARDTANH_SCALE as CHAIN
from numba_impl.oracle import check_epilogue, check_epilogue_gradient, check_layer, check_layer_gradient
from numba_impl.problem import Operand
from tests.backends.composite.conftest import small
from tests.cases import CLAMPED, GPUS, OPEN, VIEWS, Case, bits, problem

LAYER = Case((2, 3, 3, 5), 6, 3, 2, 1, 1)
FORMAT = {"contiguous": "nchw", "channels_last": "nhwc"}

every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
every_view = pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)


def activation(x, torch_only=""):
    return arguments.activation("activate", CHAIN, kind("x", x), torch_only)


@pytest.mark.gpu
@pytest.mark.usefixtures("torch_rounds_once")
@small
@every_dtype
@every_view
@pytest.mark.parametrize("like", ["contiguous", "channels_last"])
def test_layer(like, view, dtype, kernel_device):
    """Convolutions give channels_last results where the weight is so; gy has any strides and is not written."""
    x, weight, bias = LAYER.draw(kernel_device, dtype)
    weight, gy = VIEWS[like](weight), view(torch.randn(LAYER.output_shape, device=kernel_device).to(dtype))
    before = gy.clone()
    forward, gradient = (
        backend.plan(problem(LAYER, x.device, operation, dtype, weight=Operand(weight.shape, dtype, FORMAT[like])))
        for operation in ("forward", "pre_gradient")
    )
    y, z = forward.run(x, weight, bias, CLAMPED), convolution.forward(x, weight, bias, LAYER.geometry)
    assert y.stride() == z.stride() and forward.between == dtype
    check_layer(y, x, weight, bias, LAYER.geometry, CLAMPED, between=dtype)
    g = gradient.run(x, weight, bias, gy, OPEN)
    check_layer_gradient(g, x, weight, bias, gy, LAYER.geometry, OPEN, between=dtype)
    assert torch.equal(bits(gy), bits(before)), "gy was written"


@pytest.mark.gpu
@small
@every_dtype
@every_view
def test_activation(view, dtype, kernel_device):
    """In place where x is dense; else the result is new."""
    x = view(torch.randn(2, 3, 4, 5, device=kernel_device).to(dtype))
    before, dense = x.clone(), view is not VIEWS["expanded"] and x.untyped_storage().nbytes() // x.itemsize <= x.numel() + 1
    run = backend.plan(activation(x)).run
    y = run(x, None, CLAMPED)
    assert y is not x and torch.equal(bits(x), bits(before)), "the input was written"
    check_epilogue(y, x, CLAMPED)
    z = run(x, x, CLAMPED)
    assert (z is x) == dense
    assert dense or torch.equal(bits(x), bits(before)), "the input was written"
    assert torch.equal(bits(z), bits(y))


@pytest.mark.gpu
@small
@pytest.mark.parametrize("shape", [(), (0,), (7,), (2, 0, 3), (1, 2, 3, 4, 5)], ids=str)
def test_activation_of_any_shape(shape, kernel_device):
    x = torch.randn(shape, device=kernel_device)
    check_epilogue(backend.plan(activation(x)).run(x, None, OPEN), x, OPEN)


@pytest.mark.gpu
@small
@every_dtype
@every_view
def test_activation_gradient(view, dtype, kernel_device):
    """Of any strides of x and of gy; neither is written."""
    x, gy = torch.randn(2, 2, 3, 4, 5, device=kernel_device).to(dtype)
    x, before = view(x), (bits(view(x)), bits(gy))
    g = backend.plan(arguments.activation("activate_gradient", CHAIN, kind("x", x), "")).run(x, gy, CLAMPED)
    assert torch.equal(bits(x), before[0]) and torch.equal(bits(gy), before[1]), "an input was written"
    wide = x.float()
    clamped = backend.plan(activation(wide)).run(wide, None, CLAMPED._replace(scale=1.0))
    check_epilogue_gradient(g, x, gy, clamped, CLAMPED)


@pytest.mark.gpu
@pytest.mark.simulator
@pytest.mark.usefixtures("small_pieces")
@every_dtype
def test_channel_sum(dtype, kernel_device):
    g = torch.randn(2, 3, 4, 5, device=kernel_device).to(dtype)
    sums = backend.plan(arguments.channel_sum(kind("g", g))).run(g, ())
    want = reference(arguments.channel_sum(kind("g", g))).run(g, ())
    assert sums.dtype == torch.float32
    torch.testing.assert_close(sums, want, rtol=1e-5, atol=1e-5)


def test_what_it_declines(monkeypatch):
    x = torch.zeros(2, 3, 4, 5)
    assert backend.why_not(activation(x)) == "x is on cpu, not on a CUDA device"
    monkeypatch.setattr(gpu, "why_no_kernels", lambda device: "")
    assert backend.why_not(activation(x)) == "" and backend.why_not(problem(LAYER)) == ""
    assert backend.why_not(activation(x, torch_only="a reason")) == "a reason"
    assert backend.why_not(activation(x.double())).startswith("x is torch.float64, not torch.float32 or torch.bfloat16")
    for g in x, x[:, :, ::2], x[:1, :1, :1, :1].expand(2, 3, 4, 5):
        assert backend.why_not(arguments.channel_sum(kind("g", g))) == ""
    g = x.to(memory_format=torch.channels_last)
    assert backend.why_not(arguments.channel_sum(kind("g", g))) == "it sums planes, which channels_last has not"


def test_predicted_time_grows_with_the_bytes(monkeypatch):
    """Sums read, the activation reads and writes; a convolution takes longest."""
    monkeypatch.setattr(gpu, "why_no_kernels", lambda device: "")
    monkeypatch.setattr(gpu, "of", lambda device: GPUS[9, 0])
    x, device = torch.zeros(LAYER.output_shape), torch.device("cuda")
    alone = [replace(described, device=device) for described in (arguments.channel_sum(kind("g", x)), activation(x))]
    sums, activates, layer = map(backend.cycles, [*alone, problem(LAYER, device)])
    assert 0 < sums < activates < layer
