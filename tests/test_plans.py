"""A call's plan: found again for equal calls, made anew for whatever it depends on, and never a way round the checks."""

import copy
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from model_numba import ModelNumba
from numba_impl import conv_transpose2d_mish_add_hardtanh_scale, dispatch, functional
from numba_impl.arguments import kind
from numba_impl.backends import cpu as backend_cpu
from numba_impl.epilogue import Constants
from numba_impl.errors import KernelError
from numba_impl.oracle import check_layer
from tests.cases import USUAL, VIEWS, Case, apply, captured, every_device

CONSTANTS = Constants(-0.5, 2.0)


def made():
    """How many plans were made since the test began."""
    return dispatch.remembered.cache_info().misses


def call(case=USUAL, device="cpu", view=lambda t: t, dtype=torch.float32, **options):
    """The functional form on fresh data, which is checked."""
    x, weight, bias = case.draw(device, dtype)
    y = apply(view(x), weight, bias, case, **options)
    check_layer(y, view(x), weight, bias, case.geometry, CONSTANTS)


@every_device
def test_equal_calls_have_one_plan(device):
    for _ in range(3):
        call(device=device)
        x, weight, bias = USUAL.draw(device)
        apply(x[None, 0], weight, bias, USUAL)  # a batch of one
    assert made() == 2


@every_device
@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_strides_and_alignment_are_looked_at_in_each_call(view, device):
    """But for the memory format, by which backends choose."""
    kinds = {kind("x", view(USUAL.draw(device)[0])), kind("x", USUAL.draw(device)[0])}
    call(device=device)
    call(device=device, view=view)
    call(device=device)
    assert made() == len(kinds)


OTHERS = {
    "batch": dict(case=Case((3, 6, 7, 9), 5, 3, 2, 1, 1)),
    "height": dict(case=Case((2, 6, 8, 9), 5, 3, 2, 1, 1)),
    "channels": dict(case=Case((2, 6, 7, 9), 4, 3, 2, 1, 1)),
    "kernel": dict(case=Case((2, 6, 7, 9), 5, 4, 2, 1, 1)),
    "stride": dict(case=Case((2, 6, 7, 9), 5, 3, 3, 1, 1)),
    "padding": dict(case=Case((2, 6, 7, 9), 5, 3, 2, (0, 1), 1)),
    "output padding": dict(case=Case((2, 6, 7, 9), 5, 3, 2, 1, 0)),
    "no bias": dict(case=Case((2, 6, 7, 9), 5, 3, 2, 1, 1, bias=False)),
    "dtype": dict(dtype=torch.bfloat16),
    "precision left to the flags": dict(precision=None),
    "forced": dict(backend="reference"),
}


@every_device
@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_another_call_has_another_plan(other, device, conv_precision):
    conv_precision("ieee")
    for options in ({}, other, {}, other):
        call(device=device, **options)
    assert made() == 2


def test_constants_are_no_part_of_a_plan():
    x, weight, bias = USUAL.draw()
    for add_value, scale in ((0.5, 2), (-0.5, 2.0), (0.0, -1.0), (1, -0.0), (1, 0.0)):
        y = apply(x, weight, bias, USUAL, add_value, scale)
        want = apply(x, weight, bias, USUAL, add_value, scale, backend="reference")
        torch.testing.assert_close(y, want)
        if scale == 0:
            assert torch.equal(y.signbit(), want.signbit()), "one zero for another"
    assert made() == 2


def served_by(x, weight, bias):
    return dispatch.choose(functional.describe(x, weight, bias, 2, 1, 1, "fp32"))[0]


@every_device
def test_modes_that_change_between_calls(device):
    """Autocast, forward mode and torch.func, each on and off again."""
    x, weight, bias = USUAL.draw(device)
    want = apply(x, weight, bias, USUAL)
    usual = served_by(x, weight, bias)
    for _ in range(2):
        with torch.autocast(device, dtype=torch.bfloat16):
            assert served_by(x, weight, bias) != "reference"
            low = apply(x, weight, bias, USUAL)
        _, tangent = torch.func.jvp(lambda t: apply(t, weight, bias, USUAL), (x,), (torch.ones_like(x),))
        mapped = torch.func.vmap(lambda t: apply(t, weight, bias, USUAL))(x)
        assert served_by(x, weight, bias) == usual
        torch.testing.assert_close(low.float(), want, rtol=0.1, atol=0.1)
        torch.testing.assert_close(mapped, want, rtol=1e-4, atol=1e-4)
        assert tangent.shape == want.shape and tangent.any()
        torch.testing.assert_close(apply(x, weight, bias, USUAL), want)


@every_device
def test_gradients_that_are_wanted_between_calls(device):
    model = ModelNumba(6, 5, 3, 2, 1, 1, -0.5, 2, precision="fp32").to(device)
    x = USUAL.draw(device)[0]
    for _ in range(2):
        with torch.no_grad():
            assert model(x).grad_fn is None
        y = model(x)
        y.sum().backward()
        assert all(parameter.grad.any() for parameter in model.parameters())
        model.requires_grad_(False)
        assert model(x).grad_fn is None
        model.requires_grad_(True)


BAD = {
    "stride must be an int": (TypeError, dict(stride=2.0)),
    "stride must be an int,": (TypeError, dict(stride=(2, True))),
    "padding must be an int": (TypeError, dict(padding=True)),
    "padding must be an int or a pair": (ValueError, dict(padding=(1, 1, 1))),
    "output_padding must be at least 0": (ValueError, dict(output_padding=-1)),
    "add_value must be a real number": (TypeError, dict(add_value=True)),
    "scale must be a real number": (TypeError, dict(scale=[2.0])),
    "precision must be None or one of": (ValueError, dict(precision="fp16")),
    "backend must be None or one of": (ValueError, dict(backend="fastest")),
    "x must be a torch.Tensor": (TypeError, dict(x=[1.0])),
    "x must be dense": (TypeError, dict(x=torch.randn(USUAL.x).to_sparse())),
    "x must have a real floating-point": (TypeError, dict(x=torch.ones(USUAL.x, dtype=torch.int32))),
    "x must have 6 channels": (ValueError, dict(x=torch.randn(2, 5, 7, 9))),
    "weight must have x's dtype": (TypeError, dict(weight=torch.randn(USUAL.weight_shape).double())),
    "weight must be on x's device": (ValueError, dict(weight=torch.randn(USUAL.weight_shape, device="meta"))),
    "bias must have shape": (ValueError, dict(bias=torch.randn(6))),
    "bias must be a torch.Tensor": (TypeError, dict(bias=0.0)),
}


@pytest.mark.parametrize("words", BAD)
def test_a_bad_call_after_a_good_one(words):
    error, changes = BAD[words]
    x, weight, bias = USUAL.draw()
    good = dict(x=x, weight=weight, bias=bias, stride=2, padding=1, output_padding=1, add_value=1.0, scale=2.0)
    for _ in range(2):
        want = conv_transpose2d_mish_add_hardtanh_scale(**good)
        with pytest.raises(error, match=f"^{words}"):
            conv_transpose2d_mish_add_hardtanh_scale(**good | changes)
        assert torch.equal(conv_transpose2d_mish_add_hardtanh_scale(**good), want)


def test_a_backend_that_fails_between_calls(monkeypatch):
    """Its plan is not found again, even if it would work once more."""
    with monkeypatch.context() as patch:
        call()
        patch.setattr(backend_cpu, "_run", fail)
        with pytest.warns(RuntimeWarning, match="'cpu' is out of service .*broken"):
            call()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call()
    assert served_by(*USUAL.draw()) == "reference"


def fail(*args):
    raise KernelError("broken")


def test_there_are_not_more_plans_than_a_thousand():
    weight, most = USUAL.draw()[1], dispatch.remembered.cache_info().maxsize
    for width in range(1, most + 50):
        x = torch.empty(1, 6, 1, width)
        apply(x, weight, None, USUAL, backend="reference")
    assert dispatch.remembered.cache_info().currsize == most <= 1024


@every_device
def test_eight_threads(device):
    """Plans made and used at the same time, on a stream each."""
    cases = [Case((batch, 6, 5, width), 5, 3, 2, 1, 1) for batch in (1, 2) for width in (4, 7, 8)]

    def work(seed):
        stream = torch.cuda.Stream() if device == "cuda" else None
        with torch.cuda.stream(stream), torch.no_grad():
            for round in range(20):
                call(cases[(seed + round) % len(cases)], device)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    assert dispatch.remembered.cache_info().currsize == len(cases)


# On a GPU: nothing that a call remembers outlives a change of the weights or of a flag, and no call waits for the GPU.

SERVED = {
    "by default": (Case((1, 64, 8, 8), 64, 3, 2, 1, 1), None),
    "hopper": (Case((2, 16, 20, 70), 16, 3, 2, 1, 1), "hopper"),
    "tiled, weights as they are": (Case((1, 64, 8, 8), 64, 3, 2, 1, 1), "tiled"),
    "tiled, weights packed": (Case((2, 16, 20, 70), 16, 4, 2, 1), "tiled"),
    "composite": (Case((2, 16, 20, 70), 16, 3, 2, 1, 1), "composite"),
}


@pytest.fixture(params=SERVED.values(), ids=SERVED)
def served(request):
    """(case, model on the GPU): in fp32, by a backend."""
    case, backend = request.param
    if backend == "hopper" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("for compute capability (9, 0) alone")
    sizes = case.kernel_size, case.stride, case.padding, case.output_padding
    return case, ModelNumba(case.x[1], case.out_channels, *sizes, -0.5, 2, precision="fp32", backend=backend).cuda()


def check_model(model, case, y, x):
    conv = model.conv_transpose
    check_layer(y, x, conv.weight, conv.bias, case.geometry, CONSTANTS)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_no_call_waits_for_the_gpu(served):
    """Not one of a kind for which there is no plan either; nor a step of training."""
    case, model = served
    x = torch.randn(case.x, device="cuda")
    larger = torch.cat([x, x])
    model(x).sum().backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.no_grad():
            y, _ = model(x), model(larger)
        model(x).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    check_model(model, case, y, x)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("data", [False, True], ids=["in place", "through .data"])
def test_no_weight_is_stale(data, mode, served):
    """Parameters made in inference mode have no version, and ``.data`` does not count one up."""
    case, model = served
    with mode():
        model = ModelNumba.from_conv(copy.deepcopy(model.conv_transpose), -0.5, 2, precision="fp32", backend=model.backend)
        x = torch.randn(case.x, device="cuda")
        for _ in range(3):
            check_model(model, case, model(x), x)
            for parameter in model.parameters():
                (parameter.data if data else parameter).mul_(-2)


@pytest.mark.gpu
def test_a_replayed_graph_sees_new_weights(served):
    case, model = served
    x = torch.randn(case.x, device="cuda")
    with torch.no_grad():
        graph, y = captured(model, x)
        for _ in range(2):
            x.copy_(torch.randn_like(x))
            for parameter in model.parameters():
                parameter.mul_(-2)
            graph.replay()
            check_model(model, case, y, x)


@pytest.mark.gpu
def test_flags_that_change_between_calls(conv_precision, hopper):
    case = Case((8, 64, 128, 128), 64, 3, 2, 1, 1)
    model = ModelNumba(64, 64, 3, 2, 1, 1, -0.5, 2).cuda()
    x = torch.randn(case.x, device="cuda")
    with torch.no_grad():
        results = {}
        for flag, precision in 2 * (("ieee", "fp32"), ("tf32", "tf32")):
            conv_precision(flag)
            results.setdefault(precision, []).append(y := model(x))
            check_layer(y, x, model.conv_transpose.weight, model.conv_transpose.bias, case.geometry, CONSTANTS, precision)
    (strict, strict_again), (tf32, tf32_again) = results.values()
    assert torch.equal(strict, strict_again) and torch.equal(tf32, tf32_again) and not torch.equal(strict, tf32)
