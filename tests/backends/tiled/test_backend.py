"""The tiled backend's plans, of tensors in any layout (simulator and GPU), and what it declines."""

import pytest
import torch

from numba_impl import gpu
from numba_impl.backends.tiled import backend
from numba_impl.oracle import check_layer, check_layer_gradient
from tests.backends.tiled.test_kernel import SMALL
from tests.cases import CLAMPED, GPUS, OPEN, VIEWS, Case, bits, problem

LAYER = Case((2, 3, 3, 5), 5, 3, 2, 1, 1)


@pytest.mark.gpu
@pytest.mark.simulator
@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_any_layout(view, kernel_device, monkeypatch):
    """No tensor need be contiguous, and none is written; the tile is one that the simulator can compute."""
    monkeypatch.setattr(backend, "tile_for", lambda problem: SMALL)
    x, weight, bias = LAYER.draw(kernel_device)
    tensors = [
        *(view(t) for t in (x, weight)),
        bias.repeat_interleave(2)[::2],
        view(torch.randn(LAYER.output_shape).to(x.device)),
    ]
    before = [t.clone() for t in tensors]
    y = backend.plan(problem(LAYER, x.device)).run(*tensors[:3], CLAMPED)
    g = backend.plan(problem(LAYER, x.device, operation="pre_gradient")).run(*tensors, OPEN)
    assert y.is_contiguous() and g.is_contiguous()
    assert all(torch.equal(bits(t), bits(old)) for t, old in zip(tensors, before, strict=True)), "an input was written"
    if view is not VIEWS["expanded"]:  # whose terms are not independent, as the bounds have it
        check_layer(y, *tensors[:3], LAYER.geometry, CLAMPED)
        check_layer_gradient(g, *tensors, LAYER.geometry, OPEN)
    contiguous = [t.contiguous() for t in tensors]
    assert torch.equal(bits(backend.plan(problem(LAYER, x.device)).run(*contiguous[:3], CLAMPED)), bits(y))
    assert torch.equal(bits(backend.plan(problem(LAYER, x.device, operation="pre_gradient")).run(*contiguous, OPEN)), bits(g))


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    monkeypatch.setattr(gpu, "why_no_kernels", lambda device: "")
    monkeypatch.setattr(gpu, "of", lambda device: GPUS[9, 0])


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize(
    ("case", "reason"),
    [
        (LAYER, ""),
        (Case((1, 8, 64, 64), 8, 31, 1, 0), "no tile holds the sums of Geometry"),
        (Case((1, 2, 2**15, 2**15), 8, 3, 1, 1), "an image has 2^31 values or more"),
        (Case((1, 1, 1, 2**30), 8, 3, (1, 2), 1, (0, 1)), "an output has 2^31 channels, rows or columns, or more"),
        (Case((2**31 - 1, 1, 1, 1), 200, 3, 2, 1, 1), "it would take 2^31 blocks or more"),
        (Case((1, 2**16, 1, 1), 2**13, 2, 2), "the weight has 2^31 values or more"),
    ],
    ids=str,
)
def test_what_it_declines(case, reason):
    found = backend.why_not(problem(case, "cuda"))
    assert found.startswith(reason) and bool(found) == bool(reason)


@pytest.mark.usefixtures("as_on_a_gpu")
def test_it_serves_the_layer_alone():
    assert backend.why_not(problem(LAYER, "cuda", operation="activate")) == (
        "it is for forward and pre_gradient alone, not activate"
    )
    assert backend.why_not(problem(LAYER, "cuda", dtype=torch.float64)).startswith("x is torch.float64, not torch.float32 or")
    assert backend.why_not(problem(LAYER, "cuda", dtype=torch.float16)) == ""
    assert backend.why_not(problem(LAYER, "cuda", torch_only="a reason")) == "a reason"
    assert backend.plan(problem(LAYER, "cuda", permitted="tf32")).precision == "fp32"
