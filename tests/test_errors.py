"""Bad input: an error of the right type that names the argument, its value and what is allowed."""

import re

import pytest
import torch
from torch import nn

from model_numba import ModelNumba
from numba_impl import conv_transpose2d_mish_add_hardtanh_scale, mish_add_hardtanh_scale

SIZES = dict(in_channels=4, out_channels=3, kernel_size=3, stride=2, padding=1, output_padding=1, add_value=0.5, scale=2)


def layer(x=(1, 4, 5, 6), **changes):
    """Build the module, ``changes`` in its arguments, and run it on ``x``: a tensor or the shape of one."""
    return ModelNumba(**SIZES | changes)(torch.randn(x) if isinstance(x, tuple) else x)


def function(x=None, weight=None, bias=None, **changes):
    """Call the functional form, ``changes`` in its arguments."""
    x = torch.randn(1, 4, 5, 6) if x is None else x
    weight = torch.randn(4, 3, 3, 3) if weight is None else weight
    return conv_transpose2d_mish_add_hardtanh_scale(x, weight, bias, **dict(add_value=0.5, scale=2) | changes)


def activation(x=None, *args, **changes):
    return mish_add_hardtanh_scale(torch.randn(5) if x is None else x, *(args or (0.5, 2)), **changes)


def conv(**changes):
    return nn.ConvTranspose2d(**dict(in_channels=4, out_channels=6, kernel_size=3) | changes)


def from_conv(module, add_value=0.5, scale=2, **changes):
    return ModelNumba.from_conv(module, add_value, scale, **changes)


def other_padding_mode():
    """torch itself refuses to build one; a conversion tool may still leave the attribute."""
    module = conv()
    module.padding_mode = "reflect"
    return module


def check(error, words, call):
    """Assert that ``call`` raises ``error`` with each of the words in its message."""
    with pytest.raises(error) as caught:
        call()
    message = str(caught.value)
    for word in words.split():
        assert re.search(rf"(?<!\w){re.escape(word)}(?!\w)", message), f"{word!r} is not in: {message}"


def quantised():
    return torch.quantize_per_tensor(torch.randn(1, 4, 5, 6), 0.1, 0, torch.quint8)


def case(words, error, function, *args, **kwargs):
    return pytest.param(error, words, lambda: function(*args, **kwargs), id=words)


CASES = [
    # Shapes
    case("x channels 4 5", ValueError, layer, (1, 5, 5, 6)),
    case("x channels 4 3", ValueError, layer, (3, 5, 6)),
    case("x 4-D 3-D (5, 6)", ValueError, layer, (5, 6)),
    case("x 4-D 3-D (1, 1, 4, 5, 6)", ValueError, layer, (1, 1, 4, 5, 6)),
    case("x height 1 0", ValueError, layer, (1, 4, 0, 6)),
    case("x width 1 0", ValueError, layer, (1, 4, 5, 0)),
    case("weight 4-D (4, 3, 3)", ValueError, function, weight=torch.ones(4, 3, 3)),
    case("weight 0 (4, 0, 3, 3)", ValueError, function, weight=torch.ones(4, 0, 3, 3)),
    case("weight 0 (0, 3, 3, 3)", ValueError, function, torch.ones(1, 0, 5, 6), torch.ones(0, 3, 3, 3)),
    case("bias (3,) (4,)", ValueError, function, bias=torch.ones(4)),
    case("bias (3,) (3, 1)", ValueError, function, bias=torch.ones(3, 1)),
    case("output height 1 0", ValueError, layer, (1, 4, 1, 6), padding=(2, 1), output_padding=0, kernel_size=4),
    case("output width 1 -1", ValueError, layer, (1, 4, 5, 1), padding=(0, 2), output_padding=0),
    # Geometry
    *(case(f"{name} 1 0", ValueError, layer, **{name: 0}) for name in ("in_channels", "out_channels", "kernel_size", "stride")),
    *(case(f"{name} 1 -2", ValueError, layer, **{name: -2}) for name in ("in_channels", "out_channels", "kernel_size", "stride")),
    case("kernel_size 1 0", ValueError, layer, kernel_size=(3, 0)),
    case("stride 1 -1", ValueError, layer, stride=(-1, 2)),
    case("padding 0 -1", ValueError, layer, padding=-1),
    case("output_padding 0 -1", ValueError, layer, output_padding=-1),
    case("output_padding smaller stride 2", ValueError, layer, output_padding=2),
    case("output_padding smaller stride (0, 1) (2, 1)", ValueError, layer, stride=(2, 1), output_padding=(0, 1)),
    case("stride pair (1, 2, 3)", ValueError, layer, stride=(1, 2, 3)),
    case("padding pair ()", ValueError, layer, padding=()),
    case("stride int 2.0", TypeError, layer, stride=2.0),
    case("stride int True", TypeError, layer, stride=True),
    case("stride int 2.0", TypeError, lambda: (layer(stride=(2, 2)), layer(stride=(2.0, 2)))),  # equal to the pair before
    case("kernel_size int '3'", TypeError, layer, kernel_size="3"),
    case("padding int None", TypeError, layer, padding=None),
    case("in_channels int 4.0", TypeError, layer, in_channels=4.0),
    case("stride 1 0", ValueError, function, stride=0),
    case("stride 2147483647 4294967297", ValueError, function, stride=2**32 + 1),  # torch's convolution would see 1
    case("padding 2147483647 9223372036854775808", ValueError, layer, padding=2**63),
    case("in_channels 2147483647 2147483648", ValueError, layer, in_channels=2**31),
    case("output height 2147483647 8589934591", ValueError, function, stride=2**31 - 1),
    case("padding 0 -3", ValueError, function, padding=(0, -3)),
    case("output_padding smaller stride 1", ValueError, function, output_padding=1),
    # Kinds of tensor
    case("add_value scale float", ValueError, layer, add_value=10**400),
    case("x torch.Tensor list", TypeError, layer, [1.0]),
    case("x torch.Tensor NoneType", TypeError, mish_add_hardtanh_scale, None, 0.5, 2),
    case("weight torch.Tensor ndarray", TypeError, function, weight=torch.ones(4, 3, 3, 3).numpy()),
    case("x floating-point int64", TypeError, layer, torch.ones(1, 4, 5, 6, dtype=torch.int64)),
    case("x floating-point bool", TypeError, layer, torch.ones(1, 4, 5, 6, dtype=torch.bool)),
    case("x floating-point complex64", TypeError, layer, torch.ones(1, 4, 5, 6, dtype=torch.complex64)),
    case("x floating-point quint8", TypeError, lambda: layer(quantised())),
    case("x dense torch.sparse_coo", TypeError, layer, torch.ones(1, 4, 5, 6).to_sparse()),
    case("weight floating-point complex64", TypeError, function, weight=torch.ones(4, 3, 3, 3, dtype=torch.complex64)),
    case("weight dense torch.sparse_coo", TypeError, function, weight=torch.ones(4, 3, 3, 3).to_sparse()),
    case("bias floating-point int32", TypeError, function, bias=torch.ones(3, dtype=torch.int32)),
    case("x floating-point int32", TypeError, activation, torch.ones(3, dtype=torch.int32)),
    case("x floating-point complex128", TypeError, activation, torch.ones(3, dtype=torch.complex128)),
    case("x floating-point qint8", TypeError, lambda: activation(torch.quantize_per_tensor(torch.ones(3), 1, 0, torch.qint8))),
    case("x dense torch.sparse_coo", TypeError, activation, torch.ones(3).to_sparse()),
    # Tensors that do not go together
    case("weight dtype float64 float32", TypeError, layer, torch.ones(1, 4, 5, 6, dtype=torch.float64)),
    case("bias float32 float64", TypeError, function, bias=torch.ones(3, dtype=torch.float64)),
    case("weight device meta cpu", ValueError, layer, torch.ones(1, 4, 5, 6, device="meta")),
    case("weight device cpu meta", ValueError, function, weight=torch.ones(4, 3, 3, 3, device="meta")),
    case("bias device cpu meta", ValueError, function, bias=torch.ones(3, device="meta")),
    # Backends and precision
    case("backend None tiled composite cpu reference 'hpper'", ValueError, layer, backend="hpper"),
    case("backend None tiled composite cpu reference 3", ValueError, layer, backend=3),
    case("backend None tiled 'x'", ValueError, function, backend="x"),
    case("backend 'tiled' CUDA", ValueError, layer, torch.ones(1, 4, 5, 6), backend="tiled"),
    case("backend 'composite' CUDA", ValueError, layer, torch.ones(1, 4, 5, 6), backend="composite"),
    case(
        "backend 'cpu' float64 float32",
        ValueError,
        lambda: ModelNumba(**SIZES, backend="cpu").double()(torch.ones(1, 4, 5, 6).double()),
    ),
    case(
        "backend 'cpu' meta",
        ValueError,
        lambda: ModelNumba(**SIZES, backend="cpu").to("meta")(torch.ones(1, 4, 5, 6, device="meta")),
    ),
    case("precision None fp32 tf32 'fp16'", ValueError, layer, precision="fp16"),
    case("precision None fp32 tf32 32", ValueError, function, precision=32),
    # Constants
    *(case(f"{name} number True", TypeError, layer, **{name: True}) for name in ("add_value", "scale")),
    *(case(f"{name} number '1'", TypeError, layer, **{name: "1"}) for name in ("add_value", "scale")),
    *(case(f"{name} number None", TypeError, function, **{name: None}) for name in ("add_value", "scale")),
    case("scale number (1+0j)", TypeError, activation, torch.ones(3), 0.5, 1 + 0j),
    case("add_value number tensor", TypeError, activation, torch.ones(3), torch.ones(()), 2),
    case("min_val number '0'", TypeError, activation, min_val="0"),
    case("max_val number False", TypeError, activation, max_val=False),
    case("min_val max_val 1.5 -1.5", ValueError, activation, min_val=1.5, max_val=-1.5),
    case("min_val max_val nan", ValueError, activation, min_val=float("nan")),
    # A trained convolution
    case("conv ConvTranspose2d Conv2d", TypeError, from_conv, nn.Conv2d(4, 6, 3)),
    case("conv groups 1 2", ValueError, from_conv, conv(groups=2)),
    case("conv dilation (1, 1) (2, 2)", ValueError, from_conv, conv(dilation=2)),
    case("conv padding_mode zeros reflect", ValueError, lambda: from_conv(other_padding_mode())),
    case("backend None 'none'", ValueError, from_conv, conv(), backend="none"),
    case("precision None 'bf16'", ValueError, from_conv, conv(), precision="bf16"),
    case("scale number 'big'", TypeError, from_conv, conv(), scale="big"),
]


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
@pytest.mark.parametrize(("error", "words", "call"), CASES)
def test_bad_input(error, words, call):
    check(error, words, call)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("words", "call"),
    [
        ("weight device cuda:0 cpu", lambda: layer(torch.ones(1, 4, 5, 6, device="cuda"))),
        ("weight device cpu cuda:0", lambda: ModelNumba(**SIZES).cuda()(torch.ones(1, 4, 5, 6))),
        ("'cpu' cuda:0", lambda: ModelNumba(**SIZES, backend="cpu").cuda()(torch.ones(1, 4, 5, 6, device="cuda"))),
        (
            "'tiled' float64",
            lambda: ModelNumba(**SIZES, backend="tiled").cuda().double()(torch.ones(1, 4, 5, 6, device="cuda").double()),
        ),
    ],
)
def test_bad_input_on_the_gpu(words, call):
    check(ValueError, words, call)
