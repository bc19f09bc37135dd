"""Gradients are the eager chain's, in every mode of differentiation, and never silently absent."""

import pytest
import torch
from torch import nn

from model_numba import ModelNumba
from numba_impl import convolution, mish_add_hardtanh_scale
from numba_impl.epilogue import MISH_ADD_HARDTANH_SCALE as CHAIN
from numba_impl.epilogue import Constants
from tests.cases import SIZES, USUAL, Case, apply, assert_same, eager, every_device


@every_device
@pytest.mark.parametrize("backend", ["reference", None])
def test_gradients_are_the_eager_chains(backend, device):
    module = nn.ConvTranspose2d(**SIZES, device=device)
    model, x = ModelNumba.from_conv(module, -0.5, 2.0, backend=backend, precision="fp32"), torch.randn(2, 6, 7, 9, device=device)
    results = []
    with convolution.in_precision("fp32", x.device):
        for function in (model, lambda x: eager(x, module)):
            leaf = x.clone().requires_grad_()
            y = function(leaf)
            results.append((y, *torch.autograd.grad(y.sin().sum(), (leaf, module.weight, module.bias))))
    for ours, theirs in zip(*results, strict=True):
        if backend == "reference":
            assert_same(ours, theirs)
        else:
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    assert results[0][1].count_nonzero() > 0


@pytest.mark.parametrize("case", [Case((1, 2, 2, 3), 2, 3, 2, 1, 1), Case((2, 1, 3, 2), 3, (1, 2), (2, 1))], ids=str)
@every_device
def test_gradcheck(case, device):
    tensors = [t.requires_grad_() for t in case.draw(device, torch.float64)]
    assert torch.autograd.gradcheck(lambda *tensors: apply(*tensors, case), tensors, nondet_tol=1e-10)


@every_device
@pytest.mark.parametrize("needy", ["x", "weight", "bias"])
def test_any_one_gradient(needy, device):
    tensors = dict(zip(("x", "weight", "bias"), USUAL.draw(device), strict=True))
    tensors[needy].requires_grad_()
    apply(**tensors, case=USUAL).sum().backward()
    assert tensors[needy].grad.count_nonzero() > 0


@every_device
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_no_graph_where_none_is_wanted(mode, device):
    model, x = ModelNumba(**SIZES, add_value=0.5, scale=2).to(device), torch.randn(1, 6, 7, 9, device=device)
    with mode():
        y = model(x)
        assert not y.requires_grad and y.grad_fn is None
        assert not model.explain(x).startswith("reference")
        mish_add_hardtanh_scale(torch.randn(5, device=device), 0.5, 2.0, inplace=True)


@every_device
@pytest.mark.parametrize("function", ["layer", "activation"])
def test_forward_mode_gradients(function, device):
    """A tangent is a gradient without requires_grad."""
    x, weight, bias = USUAL.draw(device, torch.float32)
    tangent = torch.randn_like(x)
    ours, theirs = (
        (lambda x: apply(x, weight, bias, USUAL), lambda x: apply(x, weight, bias, USUAL, backend="reference"))
        if function == "layer"
        else (
            lambda x: mish_add_hardtanh_scale(x, -0.5, 2.0),
            lambda x: CHAIN.forward(x, Constants(-0.5, 2.0)),
        )
    )
    _, want = torch.func.jvp(theirs, (x,), (tangent,))
    _, got = torch.func.jvp(ours, (x,), (tangent,))
    torch.testing.assert_close(got, want)
    with torch.autograd.forward_ad.dual_level():
        dual = ours(torch.autograd.forward_ad.make_dual(x, tangent))
        torch.testing.assert_close(torch.autograd.forward_ad.unpack_dual(dual).tangent, want)
