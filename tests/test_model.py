"""ModelNumba as a module: a twin of the plain model in state and seed; copies, moves and settings."""

import copy

import pytest
import torch
from torch import nn

from model_numba import ModelNew, ModelNumba
from numba_impl import convolution
from tests.cases import SIZES, assert_same, eager, every_device


class Reference(nn.Module):
    """The plain model, as KernelBench writes it."""

    def __init__(self, in_channels, out_channels, kernel_size, stride, padding, output_padding, add_value, scale):
        super().__init__()
        self.conv_transpose = nn.ConvTranspose2d(in_channels, out_channels, kernel_size, stride, padding, output_padding)
        self.add_value = add_value
        self.scale = scale

    def forward(self, x):
        x = torch.nn.functional.mish(self.conv_transpose(x)) + self.add_value
        return torch.nn.functional.hardtanh(x, min_val=-1, max_val=1) * self.scale


KERNELBENCH = (64, 64, 3, 2, 1, 1, 0.5, 2)


def test_a_seeded_twin_is_bit_equal(seed):
    twins = []
    for kind in (Reference, ModelNumba):
        torch.manual_seed(seed)
        twins.append(kind(*KERNELBENCH))
    theirs, ours = (twin.state_dict() for twin in twins)
    assert list(theirs) == list(ours) == ["conv_transpose.weight", "conv_transpose.bias"]
    assert all(torch.equal(theirs[name], ours[name]) for name in theirs)
    assert (twins[1].add_value, twins[1].scale) == (0.5, 2)


@every_device
def test_a_reference_checkpoint_loads(device):
    theirs, ours = (kind(*KERNELBENCH).to(device) for kind in (Reference, ModelNew))
    ours.load_state_dict(theirs.state_dict(), strict=True)
    x = torch.randn(1, 64, 5, 6, device=device)
    with torch.no_grad(), convolution.in_precision("fp32", x.device):
        torch.testing.assert_close(ours(x), theirs(x), rtol=1e-5, atol=1e-5)


def test_from_conv_shares_the_parameters():
    module = nn.ConvTranspose2d(**SIZES)
    model = ModelNumba.from_conv(module, 0.5, 2, precision="fp32", backend="cpu")
    assert model.conv_transpose is module
    assert (model.add_value, model.scale, model.precision, model.backend) == (0.5, 2, "fp32", "cpu")
    x = torch.randn(1, 6, 5, 4)
    with torch.no_grad():
        before = model(x)
        module.bias.add_(0.1)
        assert not torch.equal(model(x), before)


def test_from_conv_without_bias():
    module = nn.ConvTranspose2d(**SIZES, bias=False)
    with torch.no_grad():
        x = torch.randn(1, 6, 5, 4)
        torch.testing.assert_close(ModelNumba.from_conv(module, -0.5, 2.0)(x), eager(x, module), rtol=1e-5, atol=1e-5)


def test_from_conv_of_a_subclass():
    class Mine(ModelNumba):
        pass

    assert type(Mine.from_conv(nn.ConvTranspose2d(**SIZES), 0.5, 2)) is Mine


def test_repr_shows_the_settings():
    text = repr(ModelNumba(**SIZES, add_value=0.25, scale=2, precision="tf32", backend="composite"))
    for setting in ("add_value=0.25", "scale=2", "precision='tf32'", "backend='composite'", "ConvTranspose2d(6, 5"):
        assert setting in text


@every_device
def test_copies_and_moves(device):
    model = ModelNumba(**SIZES, add_value=-0.5, scale=2, precision="fp32").to(device)
    x = torch.randn(1, 6, 5, 4, device=device)
    with torch.no_grad():
        want = model(x)
        twin = copy.deepcopy(model)
        assert_same(twin(x), want)
        twin.conv_transpose.weight.zero_()
        assert_same(model(x), want)
        torch.testing.assert_close(model.double()(x.double()).float(), want, rtol=1e-5, atol=1e-5)


def test_attributes_take_effect_at_the_next_call():
    model, x = ModelNumba(**SIZES, add_value=0.5, scale=2), torch.randn(1, 6, 5, 4)
    with torch.no_grad():
        model.add_value, model.scale = -2.0, 3
        assert (model(x) < 0).all()
        model.backend = "tiled"
        with pytest.raises(ValueError, match="'tiled' cannot serve"):
            model(x)


def test_meta_device():
    """Shapes alone, as tools that plan memory ask for them."""
    model = ModelNumba(**SIZES, add_value=0.5, scale=2).to("meta")
    assert model(torch.empty(3, 6, 5, 4, device="meta")).shape == (3, 5, 10, 8)
