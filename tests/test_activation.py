"""mish_add_hardtanh_scale, the activation as a function of any tensor, in place or not."""

import pytest
import torch

from numba_impl import mish_add_hardtanh_scale
from numba_impl.epilogue import Constants
from numba_impl.oracle import check_epilogue
from tests.cases import VIEWS, bits, every_device, expanded


@every_device
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_activation(view, inplace, device):
    x = view(3 * torch.randn(2, 6, 7, 9, device=device))
    if inplace and view is expanded:
        pytest.skip("torch writes to no tensor whose elements share memory")
    before, version = x.clone(), x._version
    y = mish_add_hardtanh_scale(x, -0.5, 2.0, -0.75, 3.0, inplace=inplace)
    check_epilogue(y, before, Constants(-0.5, 2.0, -0.75, 3.0))
    assert (y is x) == inplace and (x._version > version) == inplace
    assert inplace or torch.equal(bits(x), bits(before))


@every_device
def test_activation_writes_nothing_between_the_elements(device):
    memory = torch.randn(8, 10, device=device)
    before = memory.clone()
    mish_add_hardtanh_scale(memory[:, :7], 0.5, 2.0, inplace=True)
    assert torch.equal(memory[:, 7:], before[:, 7:])
    check_epilogue(memory[:, :7], before[:, :7], Constants(0.5, 2.0))


@every_device
@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 0, 2), (5, 1, 1)], ids=str)
def test_activation_of_any_shape(shape, device):
    x = torch.randn(shape, device=device)
    check_epilogue(mish_add_hardtanh_scale(x, 0.5, 2.0), x, Constants(0.5, 2.0))


@every_device
def test_inplace_counts_as_a_write_for_autograd(device):
    x = torch.randn(5, device=device)
    y = (x * torch.ones(5, device=device, requires_grad=True)).sum()
    with torch.no_grad():
        mish_add_hardtanh_scale(x, 0.5, 2.0, inplace=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


@every_device
def test_activation_gradient(device):
    x = torch.randn(50, device=device, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: mish_add_hardtanh_scale(x, -0.3, 2.0, -0.5, 0.5), x)
