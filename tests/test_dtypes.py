"""Dtypes, autocast and memory formats, through every backend: values against float64, dtypes and strides against eager."""

import copy
import itertools

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode

from model_numba import ModelNumba, Plain
from numba_impl import convolution, dispatch, functional, mish_add_hardtanh_scale
from numba_impl.epilogue import MISH_ADD_HARDTANH_SCALE as CHAIN
from numba_impl.epilogue import Constants
from numba_impl.oracle import Gradients, check_epilogue, check_layer, clear_of_edges
from tests.cases import USUAL, VIEWS, Case, apply, eager, every_backend, every_device
from tests.test_autograd import compiling

FLOAT32, BFLOAT16, FLOAT16 = torch.float32, torch.bfloat16, torch.float16
CONSTANTS = Constants(-0.5, 2.0)
CASES = [
    USUAL,
    Case((1, 16, 1, 1), 8, 3, 2, 1, 1),
    Case((2, 1, 5, 6), 1, 4, 2, 1, bias=False),
    Case((3, 8, 5, 8), 16, 2, 2),
    Case((0, 4, 6, 5), 3, 3, 2, 1, 1),
    Case((2, 9, 4, 5), 3, (4, 5), (2, 3), (1, 2), (1, 0)),
]
LAYOUTS = list(itertools.product(("contiguous", "channels_last"), repeat=2))
# dtypes of x and of the parameters, and autocast's
MIXED = [(FLOAT32, FLOAT32), (BFLOAT16, FLOAT32), (FLOAT16, FLOAT32), (FLOAT32, BFLOAT16), (BFLOAT16, BFLOAT16)]

every_layout = pytest.mark.parametrize(("x_layout", "weight_layout"), LAYOUTS, ids=map("-".join, LAYOUTS))
narrow = pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16], ids=str)


def draw(case, device, dtype, x_layout="contiguous", weight_layout="contiguous"):
    x, weight, bias = case.draw(device, dtype)
    return VIEWS[x_layout](x), VIEWS[weight_layout](weight), bias


def served(case, tensors, backend):
    """The plan of a call; skips where the backend asked for declines."""
    problem = functional.describe(*tensors, case.stride, case.padding, case.output_padding, "fp32")
    if backend and (reason := dispatch.BACKENDS[backend].why_not(problem)):
        pytest.skip(reason)
    return dispatch.plan(problem, backend)


def eagerly(case, x, weight, bias):
    """The chain as PyTorch computes it."""
    with convolution.in_precision("fp32", x.device):
        return CHAIN.forward(convolution.forward(x, weight, bias, case.geometry), CONSTANTS)


def loss(y, exact):
    """Its L2 error."""
    return (y.double() - exact).norm()


@every_backend
@every_layout
@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16, FLOAT16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_values_dtype_and_strides(case, dtype, x_layout, weight_layout, device, backend):
    """And where we round once, no less exact than eager over a tensor."""
    tensors = draw(case, device, dtype, x_layout, weight_layout)
    plan, theirs = served(case, tensors, backend), eagerly(case, *tensors)
    y = apply(*tensors, case, backend=backend)
    assert (y.dtype, y.stride()) == (theirs.dtype, theirs.stride())
    if plan.backend == "reference" and dtype != FLOAT32:
        torch.testing.assert_close(y, theirs, rtol=2e-2, atol=2e-2)
        return
    check_layer(y, *tensors, case.geometry, CONSTANTS, between=plan.between)
    if dtype != FLOAT32 and plan.between == FLOAT32:
        exact = CHAIN.forward(convolution.forward(*(t if t is None else t.double() for t in tensors), case.geometry), CONSTANTS)
        assert loss(y, exact) <= loss(theirs, exact)


@every_backend
@every_layout
@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16, FLOAT16], ids=str)
def test_gradients(dtype, x_layout, weight_layout, device, backend):
    case, tensors = USUAL, draw(USUAL, device, dtype, x_layout, weight_layout)
    plan = served(case, tensors, backend)
    if plan.backend == "reference":
        return  # autograd's own
    gy = clear_of_edges(torch.randn_like(eagerly(case, *tensors)), *tensors, case.geometry, CONSTANTS, between=plan.between)
    leaves = [t.detach().requires_grad_() for t in tensors]
    found = torch.autograd.grad(apply(*leaves, case, backend=backend), leaves, gy)
    theirs = torch.autograd.grad(eagerly(case, *leaves), leaves, gy)
    assert [(t.dtype, t.stride()) for t in found] == [(t.dtype, t.stride()) for t in theirs]
    Gradients.of(*tensors, gy, case.geometry, CONSTANTS, reach="image", between=plan.between).check(found)
    again = torch.autograd.grad(apply(*leaves, case, backend=backend), leaves, gy)
    assert device == "cuda" or all(map(torch.equal, found, again))


def under(device, dtype=BFLOAT16, **options):
    return torch.autocast(device, dtype, **options)


def check_autocast(model, x, dtype, device, **options):
    """Forward and gradients: dtypes and strides are eager's, values those of operands rounded first."""
    results = []
    gy = None
    for layer in (model, lambda x: eager(x, model.conv_transpose)):
        leaf = x.detach().requires_grad_()
        with under(device, dtype, **options):
            with torch.no_grad():
                inferred = layer(leaf)
            y = layer(leaf)
        gy = torch.randn_like(y) if gy is None else gy
        results.append([inferred, y, *torch.autograd.grad(y, [leaf, *model.parameters()], gy)])
    ours, theirs = results
    assert [(t.dtype, t.stride()) for t in ours] == [(t.dtype, t.stride()) for t in theirs]
    conv = model.conv_transpose
    operands = [t.detach().to(dtype) for t in (x, conv.weight, conv.bias)]
    between = dispatch.plan(functional.describe(*operands, conv.stride, conv.padding, conv.output_padding, None), None).between
    for y in ours[:2]:
        check_layer(y, *operands, USUAL.geometry, CONSTANTS, "tf32", between=between)
    for got, want in zip(ours[2:], theirs[2:], strict=True):  # eager decides on the clamp by rounded values
        assert (got - want).double().norm() <= 0.2 * want.double().norm()


@every_device
@pytest.mark.parametrize(("x_dtype", "dtype"), MIXED, ids=str)
def test_autocast(x_dtype, dtype, device):
    model = ModelNumba.from_conv(nn.ConvTranspose2d(6, 5, 3, 2, 1, 1, device=device), -0.5, 2.0)
    x = torch.randn(USUAL.x, device=device).to(x_dtype)
    for layout in VIEWS["contiguous"], VIEWS["channels_last"]:
        check_autocast(copy.deepcopy(model), layout(x), BFLOAT16 if dtype == FLOAT32 else dtype, device)
    check_autocast(model, x, FLOAT16, device, cache_enabled=False)


@every_device
def test_autocast_on_and_off(device):
    """Nested, and off inside: each call follows what is on at that moment."""
    model, x = ModelNumba(6, 5, 3, 2, 1, 1, -0.5, 2.0).to(device), torch.randn(USUAL.x, device=device)
    with torch.no_grad():
        want = model(x)
        with under(device):
            low = model(x)
            with under(device, enabled=False):
                inside = model(x)
            with under(device, FLOAT16):
                half = model(x)
            assert low.dtype == model(x).dtype == BFLOAT16 and half.dtype == FLOAT16
        other = "cuda" if device == "cpu" else "cpu"
        with torch.autocast(other, BFLOAT16, enabled=other == "cpu" or torch.cuda.is_available()):
            elsewhere = model(x)
    assert torch.equal(inside, want) and torch.equal(elsewhere, want)


@every_device
def test_autocasts_weights_keep_their_gradient(device):
    """Autocast keeps the weights that it has cast: those of ours would have no gradient for whoever shares them."""
    model, x = ModelNumba(6, 5, 3, 2, 1, 1, -0.5, 2.0).to(device), torch.randn(USUAL.x, device=device)
    with under(device):
        y = model(x)
        z = model.conv_transpose(x)
    weight, sums = model.conv_transpose.weight, (y.sum(), y.sum() + z.sum())
    of_layer, of_both = (torch.autograd.grad(t, weight, retain_graph=True)[0] for t in sums)
    assert not torch.equal(of_layer, of_both)


@every_device
def test_float64_under_autocast_is_torchs(device):
    model, x = ModelNumba(6, 5, 3, 2, 1, 1, -0.5, 2.0).to(device), torch.randn(USUAL.x, device=device, dtype=torch.float64)
    with under(device), torch.no_grad(), pytest.raises(RuntimeError):
        model(x)
    with under(device), torch.no_grad():
        assert torch.equal(model.double()(x), eager(x, model.conv_transpose))


@every_device
@every_layout
@pytest.mark.parametrize("autocast", [False, True])
def test_without_data_as_with_it(autocast, x_layout, weight_layout, device):
    """A fake result has dtype and strides of a real one, so that what is compiled around it is right."""
    model = ModelNumba(6, 5, 3, 2, 1, 1, -0.5, 2.0).to(device)
    model.conv_transpose.weight.data = VIEWS[weight_layout](model.conv_transpose.weight.data)
    for shape in (USUAL.x, (1, 6, 1, 1), (1, 6, 5, 1)):
        x = VIEWS[x_layout](torch.randn(shape, device=device))
        with torch.no_grad(), torch.autocast(device, BFLOAT16, enabled=autocast):
            y = model(x)
            with FakeTensorMode(allow_non_fake_inputs=True) as mode:
                fake = model(mode.from_tensor(x))
        assert (fake.shape, fake.dtype, fake.stride()) == (y.shape, y.dtype, y.stride())


@narrow
@every_device
@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "every_second", "misaligned"])
def test_activation(layout, dtype, device):
    """Rounded once; in place; with gradients."""
    x = VIEWS[layout](torch.randn(2, 3, 8, 7, device=device).to(dtype))
    y = mish_add_hardtanh_scale(x, *CONSTANTS)
    check_epilogue(y, x, CONSTANTS)
    leaf = x.clone().requires_grad_()
    mish_add_hardtanh_scale(leaf, *CONSTANTS).sum().backward()
    wide = x.double().requires_grad_()
    CHAIN.forward(wide, CONSTANTS).sum().backward()
    torch.testing.assert_close(leaf.grad.double(), wide.grad, rtol=2 * torch.finfo(dtype).eps, atol=1e-3)
    z = x.clone(memory_format=torch.preserve_format)
    assert mish_add_hardtanh_scale(z, *CONSTANTS, inplace=True) is z and torch.equal(z, y)


@every_device
def test_sums_beyond_fp16_are_clamped_not_infinite(device):
    """Eager's sums are infinite on the way: -inf becomes NaN in mish."""
    x = torch.full((1, 64, 2, 2), 200.0, dtype=FLOAT16, device=device)
    weight = torch.full((64, 2, 1, 1), 20.0, dtype=FLOAT16, device=device)
    weight[:, 1] = -20
    case = Case((1, 64, 2, 2), 2, 1)
    tensors = x, weight, None
    y = apply(*tensors, case)
    if served(case, tensors, None).between == FLOAT32:
        assert (y[:, 0] == 2).all() and (y[:, 1] == -1).all()
    else:
        assert (y[:, 0] == 2).all()


@narrow
@every_backend
@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "1e-7", "65504"])
def test_special_values(value, dtype, device, backend):
    tensors = draw(USUAL, device, dtype)
    tensors[0][0, 1, 3, 4] = float(value)
    tensors[2][2] = float(value)
    plan = served(USUAL, tensors, backend)
    if plan.backend in ("reference", "composite"):
        return  # torch's convolution decides
    check_layer(apply(*tensors, USUAL, backend=backend), *tensors, USUAL.geometry, CONSTANTS)


@compiling
@every_device
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("autocast", [False, True])
def test_compiled(autocast, layout, device):
    """The compiled layer between other operations: values, dtypes and strides are those of the layer called."""
    torch._dynamo.reset()
    model = ModelNumba(6, 5, 3, 2, 1, 1, -0.5, 2.0).to(device)
    x = VIEWS[layout](torch.randn(USUAL.x, device=device))
    if not autocast:
        model, x = model.bfloat16(), x.bfloat16()
    results = []
    for function in (lambda x: model(x + 0) * 1, torch.compile(lambda x: model(x + 0) * 1, backend="aot_eager", fullgraph=True)):
        leaf = x.clone().requires_grad_()
        with under(device, enabled=autocast):
            y = function(leaf)
        results.append([y, *torch.autograd.grad(y.float().square().sum(), [leaf, *model.parameters()])])
    for got, want in zip(*results, strict=True):
        assert (got.dtype, got.stride()) == (want.dtype, want.stride())
        torch.testing.assert_close(got, want)


@compiling
@every_device
def test_exported_under_autocast(device):
    """The program keeps autocast's dtype, whatever is on when it runs."""
    model, x = ModelNumba(6, 5, 3, 2, 1, 1, -0.5, 2.0).to(device), torch.randn(USUAL.x, device=device)
    with under(device), torch.no_grad():
        want, program = model(x), torch.export.export(model, (x,))
    with torch.no_grad():
        assert torch.equal(program.module()(x), want)
        with under(device, FLOAT16):
            assert program.module()(x).dtype == BFLOAT16
        plain = torch.export.export(model, (x,))
        with under(device):
            assert plain.module()(x).dtype == FLOAT32


@every_device
def test_training_with_a_gradient_scaler(device):
    """Under autocast in fp16: the loss falls as eager's does."""
    torch.manual_seed(0)
    first = nn.ConvTranspose2d(6, 5, 3, 2, 1, 1, device=device)
    x, target = torch.randn(USUAL.x, device=device), torch.rand(USUAL.output_shape, device=device)
    losses = []
    for kind in ModelNumba.from_conv, Plain:
        model = kind(copy.deepcopy(first), -0.5, 2.0)
        optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.05), torch.amp.GradScaler(device, init_scale=2.0**12)
        for _ in range(20):
            optimizer.zero_grad()
            with under(device, FLOAT16):
                error = (model(x).float() - target).square().mean()
            scaler.scale(error).backward()
            scaler.step(optimizer)
            scaler.update()
            losses.append(error.item())
    ours, theirs = losses[:20], losses[20:]
    assert ours[-1] < 0.99 * ours[0]
    torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), rtol=1e-2, atol=1e-3)
