"""The tensor-core kernel on a GPU: every edge of its tiles, every range of values, both precisions, weights that change.

The gradient's tests share few configurations, each of which takes seconds to compile.
"""

import copy
from dataclasses import replace

import pytest
import torch
from numba import cuda
from torch import nn

from model_numba import ModelNumba
from numba_impl import convolution, gpu
from numba_impl.arguments import PRECISIONS
from numba_impl.backends.hopper import backend
from numba_impl.epilogue import MISH_ADD_HARDTANH_SCALE, Constants
from numba_impl.oracle import BARE, check_epilogue_gradient, check_layer, check_layer_gradient, pre_activation
from tests.backends.values import around_the_bounds
from tests.cases import BENCHMARK, CLAMPED, MET, OPEN, VIEWS, Case, Guarded, apply, bits, captured, eager, problem

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper")]

both_precisions = pytest.mark.parametrize("precision", PRECISIONS)


def case(batch=2, in_channels=16, height=3, width=70, out_channels=8, output_padding=1, bias=True):
    return Case((batch, in_channels, height, width), out_channels, 3, 2, 1, output_padding, bias)


EDGES = {
    **{f"height {h}, width {w}": case(height=h, width=w) for h in (1, 2, 3) for w in (1, 63, 64, 65, 127, 129)},
    **{f"output padding {op}": case(width=w, output_padding=op) for op in ((0, 0), (0, 1), (1, 0)) for w in (63, 64)},
    **{f"{ci} -> {co} channels": case(in_channels=ci, out_channels=co) for ci in (8, 24, 40, 64) for co in (8, 24, 56, 64)},
    "no bias": case(bias=False),
    "empty batch": case(batch=0),
    "one pixel": case(1, 8, 1, 1, 8, 0),
    "many images of one row": case(300, 8, 1, 5),
    "many rows": case(1, 8, 1000, 3),
    "wide": case(1, 8, 2, 9000),
}


# Outputs whose rows begin at every fourth float, at every second, at any; of one image row, and of a strip more or less.
GRADIENT_EDGES = {
    **{
        f"height {h}, width {w}": case(height=h, width=w)
        for h, w in [(1, 1), (2, 63), (3, 64), (1, 65), (2, 127), (3, 129), (2, 70)]
    },
    **{f"output padding {op}": case(width=w, output_padding=op) for op, w in [((0, 0), 64), ((1, 0), 63), ((0, 1), 64)]},
    "no bias": case(bias=False),
    "empty batch": case(batch=0),
    "many images of one row": case(300, height=1, width=6),
    "many rows": case(1, height=1000, width=2),
    "wide": case(1, height=2, width=9000),
}


def run(case, x, weight, bias, constants=OPEN, precision="fp32", offset=0, gy=None):
    """Into NaNs, and check that nothing around them changed, nor x or gy; gives the output, or with gy the gradient."""
    out = Guarded(case.output_shape, x.device, offset)
    fill = backend.filler(problem(case, x.device, "forward" if gy is None else "pre_gradient", permitted=precision))
    inputs = [x] if gy is None else [x, gy]
    before = [t.clone() for t in inputs]
    fill(x, weight, bias, inputs[1:], out.tensor, constants)
    out.check()
    assert all(torch.equal(bits(t), bits(old)) for t, old in zip(inputs, before, strict=True)), "an input was written"
    return out.tensor


def check(case, x, weight, bias, constants=OPEN, precision="fp32", offset=0):
    y = run(case, x, weight, bias, constants, precision, offset)
    check_layer(y, x, weight, bias, case.geometry, constants, precision)


def check_gradient(case, x, weight, bias, constants=OPEN, precision="fp32", offset=0, gy_offset=0):
    """With gy between guard zones too, of which nothing may reach the gradient."""
    gy = Guarded(case.output_shape, "cuda", gy_offset)
    gy.tensor.normal_()
    g = run(case, x, weight, bias, constants, precision, offset, gy.tensor)
    gy.check()
    check_layer_gradient(g, x, weight, bias, gy.tensor, case.geometry, constants, precision)


@both_precisions
@pytest.mark.parametrize("case", EDGES.values(), ids=EDGES)
def test_edges(case, precision):
    check(case, *case.draw("cuda"), precision=precision)


@both_precisions
@pytest.mark.parametrize("case", GRADIENT_EDGES.values(), ids=GRADIENT_EDGES)
def test_gradient_at_edges(case, precision):
    check_gradient(case, *case.draw("cuda"), precision=precision)


def test_gradient_of_other_channels():
    other = case(in_channels=24, out_channels=40)
    check_gradient(other, *other.draw("cuda"))


def with_multiprocessors(count, monkeypatch):
    """Let plans count so many."""
    found = replace(gpu.of(torch.device("cuda:0")), multiprocessors=count)
    monkeypatch.setattr(gpu, "of", lambda device: found)


@pytest.mark.parametrize("blocks", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize("case", [case(3, height=5, width=130), case(9, 8, 1, 3), case(1, 8, 40, 64)], ids=str)
def test_more_blocks_than_work_and_the_reverse(case, blocks, monkeypatch):
    with_multiprocessors(blocks, monkeypatch)
    check(case, *case.draw("cuda"))


@pytest.mark.parametrize("blocks", [1, 3, 1000])
def test_gradient_with_more_blocks_than_work_and_the_reverse(blocks, monkeypatch):
    with_multiprocessors(blocks, monkeypatch)
    several = case(3, height=5, width=130)
    check_gradient(several, *several.draw("cuda"))


@pytest.mark.parametrize("offset", [1, 2, 3])
@pytest.mark.parametrize("width", [63, 64])
def test_misaligned_output(width, offset):
    check(case(width=width), *case(width=width).draw("cuda"), offset=offset)


@both_precisions
@pytest.mark.parametrize("offset", [0, 1, 2, 3, 4])
def test_misaligned_input(offset, precision):
    """The bulk copy engine loads x at every fourth value alone."""
    x, weight, bias = case(width=68).draw("cuda")
    moved = Guarded(x.shape, "cuda", offset).tensor.copy_(x)
    check(case(width=68), moved, weight, bias, precision=precision)


@pytest.mark.parametrize("offsets", [(1, 0), (0, 1), (2, 0), (0, 2), (2, 2), (3, 2)], ids=str)
def test_gradient_with_misaligned_tensors(offsets):
    """The gradient's offset and gy's; rows of 128 outputs."""
    check_gradient(case(width=64), *case(width=64).draw("cuda"), offset=offsets[0], gy_offset=offsets[1])


@pytest.mark.parametrize(
    "constants",
    [CLAMPED, Constants(-2.0, -3.0), Constants(0.0, 1.0, 0.0, 0.25), Constants(0.0, 0.0), Constants(0.7, 1.0, 0.5, 0.5)],
)
def test_constants(constants):
    check(case(), *case().draw("cuda"), constants)
    check_gradient(case(), *case().draw("cuda"), constants)


@both_precisions
@pytest.mark.parametrize("exponent", range(-30, 31, 4))
def test_x_of_any_scale(exponent, precision):
    x, weight, bias = case(2, 64, 5, 70, 16).draw("cuda")
    check(case(2, 64, 5, 70, 16), x * 10.0**exponent, weight, 0 * bias, precision=precision)


@pytest.mark.parametrize("exponent", range(-30, 31, 4))
def test_weights_of_any_scale(exponent):
    x, weight, bias = case(2, 64, 5, 70, 16).draw("cuda")
    check(case(2, 64, 5, 70, 16), x, weight * 10.0**exponent, 0 * bias)


def test_each_output_channel_has_weights_of_its_own_scale():
    x, weight, bias = case(2, 64, 5, 70, 16).draw("cuda")
    check(case(2, 64, 5, 70, 16), x, weight * torch.logspace(-14, 14, 16, device="cuda").view(1, -1, 1, 1), 0 * bias)


def mixtures():
    """Changes of an x [4, 64, 12, 70] in place, each of a kind that one scale does not fit."""

    def log_uniform(x):
        x *= 10.0 ** (60 * torch.rand_like(x) - 30)

    def one_huge_value(x):
        x[1, 3, 5, 7] = 3e30

    def huge_beside_the_strip(x):
        x[1, 3, 5, 64] = -1e20

    def a_tiny_pixel(x):
        x[2, :, 4, 9] *= 1e-9

    def a_tiny_pixel_beside_the_strip(x):
        x[2, :, 4, 64] *= 1e-9
        x[2, :, 4, 63] = 0

    def the_first_row_at_the_edge_of_the_rest(x):
        x[:, :, 0] *= 2e4
        x[:, :, 1:] *= 4e4

    def rows_of_different_scale(x):
        x *= 10.0 ** torch.arange(-6, 6, device="cuda").view(12, 1)

    def rows_far_apart(x):
        x *= 10.0 ** (5.0 * torch.arange(-6, 6, device="cuda").view(12, 1))

    def images_of_different_scale(x):
        x *= torch.tensor([1e-9, 1e4, 1.0, 1e-3], device="cuda").view(4, 1, 1, 1)

    def channels_of_different_scale(x):
        x *= 10.0 ** torch.linspace(-4, 0, 64, device="cuda").view(64, 1, 1)

    def zero_rows(x):
        x[:, :, ::3] = 0

    def zero_images(x):
        x[:2] = 0
        x[2, :, :7] = 0

    def mostly_zero(x):
        x *= torch.rand_like(x) < 0.01

    return [value for value in locals().values()]


@both_precisions
@pytest.mark.parametrize("change", mixtures(), ids=lambda change: change.__name__)
def test_mixtures(change, precision):
    mixed = case(4, 64, 12, 70, 16)
    x, weight, bias = mixed.draw("cuda")
    change(x)
    check(mixed, x, weight, bias, precision=precision)


@both_precisions
@pytest.mark.parametrize("change", mixtures(), ids=lambda change: change.__name__)
def test_gradient_of_mixtures(change, precision):
    mixed = case(4, 64, 12, 70, 64)
    x, weight, bias = mixed.draw("cuda")
    change(x)
    for constants in (OPEN, CLAMPED):
        check_gradient(mixed, x, weight, bias, constants, precision)


@both_precisions
@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
@pytest.mark.parametrize("column", [0, 5, 63, 64, 69])
def test_special_values_of_x(column, value, precision):
    x, weight, bias = case(2, 16, 6, 70, 16).draw("cuda")
    x[1, 2, 3, column] = float(value)
    check(case(2, 16, 6, 70, 16), x, weight, bias, precision=precision)


@both_precisions
@pytest.mark.parametrize("value", ["nan", "inf"])
@pytest.mark.parametrize("column", [0, 63, 64])
def test_gradient_with_special_values_of_x(column, value, precision):
    x, weight, bias = case(height=6).draw("cuda")
    x[1, 2, 3, column] = float(value)
    for constants in (OPEN, CLAMPED):
        check_gradient(case(height=6), x, weight, bias, constants, precision)


@pytest.mark.parametrize("constants", [OPEN, CLAMPED], ids=["open", "clamped"])
def test_a_nan_of_gy_stays_where_it_is(constants):
    """And is 0 beyond the clamp's bounds."""
    x, weight, bias = case().draw("cuda")
    gy = torch.randn(case().output_shape, device="cuda")
    gy[torch.rand_like(gy) < 0.3] = float("nan")
    g = run(case(), x, weight, bias, constants, gy=gy)
    check_layer_gradient(g, x, weight, bias, gy, case().geometry, constants)


@both_precisions
@pytest.mark.parametrize("plain", [False, True], ids=["products", "plainly"])
def test_no_gradient_exactly_where_the_output_is_at_a_bound(plain, precision):
    """Zero weights, so that the biases, one a channel, are the pre-activations: neighbours about either bound."""
    x, weight, _ = case().draw("cuda")
    if plain:
        x[:, :, :, 5] = 3e30  # beside values of order 1: no scale fits both
    gy = torch.ones(case().output_shape, device="cuda")
    for z in around_the_bounds(MET, 80).to("cuda").split(8):
        if len(z) == 8:
            clamped = run(case(), x, 0 * weight, z, MET._replace(scale=1.0), precision)
            g = run(case(), x, 0 * weight, z, MET, precision, gy=gy)
            check_epilogue_gradient(g, z.view(1, -1, 1, 1).expand(g.shape), gy, clamped, MET)


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_special_values_of_weights_and_bias(value):
    x, weight, bias = case().draw("cuda")
    bias[3] = float(value)
    check(case(), x, weight, bias)
    weight[2, 1, 0, 2] = float(value)
    check(case(), x, weight, bias)


def test_zeros():
    x, weight, bias = case().draw("cuda")
    for changed in ((0 * x, weight), (x, 0 * weight), (0 * x, 0 * weight)):
        check(case(), *changed, bias)


def test_bit_equal_when_run_twice():
    large = case(16, 64, 64, 128, 64)
    tensors = large.draw("cuda")
    assert torch.equal(bits(run(large, *tensors)), bits(run(large, *tensors)))
    gy = torch.randn(large.output_shape, device="cuda")
    assert torch.equal(*(bits(run(large, *tensors, CLAMPED, gy=gy)) for _ in range(2)))


@both_precisions
def test_gradient_of_large_images(precision):
    large = case(8, 64, 128, 128, 64)
    check_gradient(large, *large.draw("cuda"), CLAMPED, precision)


@pytest.mark.parametrize("constants", [Constants(0.5, 2.0), OPEN], ids=["clamped", "open"])
@pytest.mark.parametrize("channels", [(64, 64), (32, 64), (64, 32)], ids=str)
def test_error_beside_cudnns(channels, constants):
    """Against float64: relative L2 of the pre-activation's mish, and the largest of the clamped output, at most twice cuDNN's."""
    large = case(16, channels[0], 128, 128, channels[1])
    x, weight, bias = large.draw("cuda")
    pre, _ = pre_activation(x, weight, bias, large.geometry)
    want = MISH_ADD_HARDTANH_SCALE.forward(pre, constants)
    with convolution.in_precision("fp32", x.device):
        cudnn = MISH_ADD_HARDTANH_SCALE.forward(convolution.forward(x, weight, bias, large.geometry), constants)
    mine, theirs = (y.double() - want for y in (run(large, x, weight, bias, constants), cudnn))
    assert mine.norm() <= 2 * theirs.norm()
    if constants != OPEN:
        assert mine.abs().max() <= 2 * theirs.abs().max()


@pytest.mark.parametrize("scale", [1.0, 1e-6, 1e4])
def test_tf32_beside_cudnns(scale):
    large = case(8, 64, 128, 128, 64)
    x, weight, bias = large.draw("cuda")
    x, bias = x * scale, 0 * bias
    with convolution.in_precision("tf32", x.device):
        cudnn = MISH_ADD_HARDTANH_SCALE.forward(convolution.forward(x, weight, bias, large.geometry), BARE).double()
    y = run(large, x, weight, bias, BARE, "tf32")
    assert (y - cudnn).norm() <= 2e-6 * cudnn.norm()


@pytest.mark.parametrize("flag", ["tf32", "ieee"])
@pytest.mark.parametrize("x_shape", [(128, 64, 128, 128), (8, 64, 128, 128), (2, 64, 32, 32), (1, 64, 8, 8)], ids=str)
def test_default_precision_agrees_with_eager(x_shape, flag, conv_precision):
    conv_precision(flag)
    model = ModelNumba(64, 64, 3, 2, 1, 1, 0.5, 2).cuda()
    x = torch.rand(x_shape, device="cuda")
    with torch.no_grad():
        torch.testing.assert_close(model(x), eager(x, model.conv_transpose, 0.5, 2), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("allowed", [True, False])
def test_the_old_flag_counts(allowed, conv_precision):
    torch.backends.cudnn.allow_tf32 = allowed
    model = ModelNumba(64, 64, 3, 2, 1, 1, 0.5, 2, backend="hopper").cuda()
    x = torch.rand(8, 64, 128, 128, device="cuda")
    with torch.no_grad():
        assert model.explain(x).endswith("in tf32" if allowed else "in fp32")
        torch.testing.assert_close(model(x), eager(x, model.conv_transpose, 0.5, 2), rtol=1e-4, atol=1e-4)


CHANGES = {
    "in place": lambda model: model.conv_transpose.weight.mul_(2),
    "through .data": lambda model: model.conv_transpose.weight.data.mul_(2),
    "other .data": lambda model: setattr(model.conv_transpose.weight, "data", 2 * model.conv_transpose.weight.data),
    "another parameter": lambda model: setattr(
        model.conv_transpose, "weight", nn.Parameter(2 * model.conv_transpose.weight, requires_grad=False)
    ),
    "load_state_dict": lambda model: model.load_state_dict({k: 2 * v for k, v in model.state_dict().items()}),
    ".to() and back": lambda model: model.double().float(),
    "an optimiser step": lambda model: torch.optim.SGD(set_gradients(model).parameters(), lr=1.0).step(),
}


def set_gradients(model):
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    return model


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_weights_are_never_stale(change):
    changing = case(2, 16, 20, 70, 16)
    model = ModelNumba(16, 16, 3, 2, 1, 1, -0.5, 2, precision="fp32", backend="hopper").cuda()
    x, *_ = changing.draw("cuda")
    with torch.no_grad():
        model(x)
        change(model)
        conv = copy.deepcopy(model.conv_transpose)
        check_layer(model(x), x, conv.weight, conv.bias, changing.geometry, Constants(-0.5, 2.0))


def test_a_replayed_graph_sees_changed_weights_and_input():
    model = ModelNumba(16, 16, 3, 2, 1, 1, -0.5, 2, precision="fp32", backend="hopper").cuda()
    x = torch.randn(2, 16, 20, 70, device="cuda")
    with torch.no_grad():
        graph, y = captured(model, x)
        x.copy_(torch.randn_like(x))
        model.conv_transpose.weight.mul_(-3)
        graph.replay()
        assert torch.equal(y, model(x))


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_no_call_synchronises():
    model = ModelNumba(16, 16, 3, 2, 1, 1, -0.5, 2, backend="hopper").cuda()
    x = torch.randn(2, 16, 20, 70, device="cuda")
    with torch.no_grad():
        model(x)
        torch.cuda.set_sync_debug_mode("error")
        try:
            model(x)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_benchmark():
    x, weight, bias = BENCHMARK.draw("cuda")
    check(BENCHMARK, x, weight, bias, CLAMPED)
    check_gradient(BENCHMARK, x, weight, bias, CLAMPED)


def test_the_backend_is_the_default_for_the_benchmark():
    model = ModelNumba(64, 64, 3, 2, 1, 1, 0.5, 2, precision="fp32").cuda()
    with torch.no_grad():
        assert model.explain(torch.empty(BENCHMARK.x, device="cuda")).startswith("hopper: serves")


@both_precisions
@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_through_the_layer_with_any_strides(view, precision):
    layer = case(3, 24, 33, 27, 40, (1, 0))
    x, weight, bias = layer.draw("cuda")
    x = view(x)
    weight = torch.empty(weight.transpose(0, 3).shape, device="cuda").transpose(0, 3).copy_(weight)  # strides of its own
    y = apply(x, weight, bias, layer, precision=precision, backend="hopper")
    check_layer(y, x, weight, bias, layer.geometry, Constants(-0.5, 2.0), precision)


def test_unbatched():
    layer = case(1, 24, 5, 7, 40)
    x, weight, bias = layer.draw("cuda")
    y = apply(x[0], weight, bias, layer, backend="hopper")
    check_layer(y[None], x, weight, bias, layer.geometry, Constants(-0.5, 2.0))


def test_anything_with_an_array_interface():
    x, weight, bias = case().draw("cuda")
    y = apply(*map(cuda.as_cuda_array, (x, weight, bias)), case(), backend="hopper")
    check_layer(y, x, weight, bias, case().geometry, Constants(-0.5, 2.0))


def test_tensors_of_one_plan_may_lie_anywhere():
    """x and gy at addresses that the bulk copy engine, and vectors, take and do not."""
    wide = case(width=64)
    x, weight, bias = wide.draw("cuda")
    gy = torch.randn(wide.output_shape, device="cuda")
    plan = backend.plan(problem(wide, x.device, "pre_gradient"))
    for x_offset, gy_offset in [(0, 0), (1, 0), (0, 2), (3, 1), (0, 0)]:
        moved = [Guarded.of(t, offset).tensor for t, offset in ((x, x_offset), (gy, gy_offset))]
        g = plan(moved[0], weight, bias, moved[1], constants=CLAMPED)
        check_layer_gradient(g, x, weight, bias, gy, wide.geometry, CLAMPED)
