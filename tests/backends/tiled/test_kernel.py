"""The tiled kernel of both operations: every path at a few pixels (simulator, GPU), real sizes (GPU)."""

from dataclasses import replace

import pytest
import torch

from numba_impl.backends.tiled import backend as tiled
from numba_impl.backends.tiled.tile import Tile
from numba_impl.epilogue import Constants
from numba_impl.oracle import check_epilogue_gradient, check_layer, check_layer_gradient
from tests.backends.values import around_the_bounds
from tests.cases import BENCHMARK, CLAMPED, MET, NETWORK_SHAPES, OPEN, Case, Guarded, bits, problem

pytestmark = [
    pytest.mark.gpu,
    # The simulator computes with NumPy, which warns of what the IEEE rules make of infinities and of what unused registers hold.
    pytest.mark.filterwarnings("ignore:.*encountered in scalar:RuntimeWarning"),
]

# Few threads: the simulator needs a millisecond for each. 8 channels x 2 rows x 8 columns of cells a block.
SMALL = Tile(channels=4, rows=2, cols=4, channel_groups=2, row_groups=1, col_groups=2, depth=2)
LARGE = Tile(channels=4, rows=2, cols=4, channel_groups=16, row_groups=1, col_groups=8)


def tile(channels, rows, cols, channel_groups, row_groups=1, col_groups=1, depth=2, unroll=1):
    return Tile(channels, rows, cols, channel_groups, row_groups, col_groups, depth, unroll=unroll)


PATHS = {
    "one tile exactly, vector stores": (Case((1, 2, 2, 8), 8, 3, 2, 1, 1), SMALL),
    "scalar stores: odd width": (Case((1, 2, 2, 8), 8, 3, 2, 1), SMALL),
    "scalar stores: 3 outputs a cell": (Case((1, 2, 2, 4), 8, 5, 3, 2, 1), tile(4, 2, 1, 1)),
    "vector stores: 4 outputs a cell": (Case((1, 2, 2, 3), 4, 4, 4), tile(4, 1, 1, 1, 2, 2)),
    "vector stores past the tile's end": (Case((1, 2, 2, 5), 8, 4, 2, 1), SMALL),
    "several tiles along every axis": (Case((2, 4, 5, 10), 17, 3, 2, 1, 1), SMALL),
    "tails along every axis": (Case((3, 3, 3, 9), 5, 3, 2, 1, 1), SMALL),
    "one pixel": (Case((1, 1, 1, 1), 1, 3, 2, 1, 1), SMALL),
    "one input channel of a deep stage": (Case((1, 1, 3, 3), 3, 3, 2, 1, 1), tile(4, 1, 2, 1, depth=8)),
    "2 channels at once": (Case((1, 5, 2, 3), 4, 3, 2, 1, 1), tile(4, 1, 2, 1, depth=4, unroll=2)),
    "a whole stage at once": (Case((1, 5, 2, 3), 4, 3, 2, 1, 1), tile(4, 1, 2, 1, depth=4, unroll=4)),
    "odd number of stages": (Case((1, 5, 2, 3), 4, 3, 2, 1, 1), SMALL),
    "empty batch": (Case((0, 2, 2, 3), 4, 3, 2, 1, 1), SMALL),
    "no bias": (Case((1, 2, 3, 4), 9, 3, 2, 1, 1, bias=False), SMALL),
    "2 columns a thread": (Case((1, 3, 3, 5), 5, 3, 2, 1, 1), tile(4, 1, 2, 1, 2, 2)),
    "1 column a thread": (Case((1, 3, 3, 5), 5, 3, 2, 1, 1), tile(4, 3, 1, 1, 1, 4)),
    "8 columns a thread": (Case((1, 2, 2, 9), 4, 3, 2, 1, 1), tile(4, 1, 8, 1)),
    "1 channel a thread": (Case((1, 2, 3, 5), 5, 3, 2, 1, 1), tile(1, 1, 4, 4)),
    "1 channel a thread, weights by four": (Case((1, 3, 3, 5), 12, 3, 2, 1, 1), tile(1, 1, 4, 8)),
    "1 channel a thread, kernel 1": (Case((1, 3, 3, 5), 6, 1), tile(1, 1, 4, 4)),
    "1 channel a thread, kernel 2": (Case((1, 3, 3, 5), 6, 2, 2), tile(1, 1, 4, 4)),
    "2 channels a thread": (Case((1, 2, 3, 5), 7, 3, 2, 1, 1), tile(2, 2, 4, 2)),
    "3 channels a thread": (Case((1, 2, 3, 5), 13, 3, 2, 1, 1), tile(3, 1, 4, 4)),
    "6 channels a thread": (Case((1, 2, 3, 5), 7, 3, 2, 1, 1), tile(6, 1, 4, 2)),
    "8 channels a thread": (Case((1, 2, 3, 5), 11, 3, 2, 1, 1), tile(8, 1, 4, 1, 2)),
    "stride 1": (Case((1, 3, 4, 5), 4, 3, 1, 1), SMALL),
    "stride 1, no padding": (Case((1, 3, 4, 6), 4, 3), SMALL),
    "stride 3": (Case((1, 3, 3, 4), 4, 5, 3, 2, 1), SMALL),
    "kernel 4": (Case((1, 3, 3, 5), 4, 4, 2, 1), SMALL),
    "kernel = stride": (Case((1, 3, 3, 5), 4, 2, 2), SMALL),
    "kernel 1": (Case((1, 3, 3, 5), 4, 1), SMALL),
    "kernel smaller than stride": (Case((1, 3, 3, 5), 4, 2, 3, 0, 2), SMALL),
    "kernel 1, stride 2, padding 1": (Case((1, 3, 4, 5), 4, 1, 2, 1, 1), SMALL),
    "padding beyond the kernel": (Case((1, 3, 8, 9), 4, 2, 2, 3), SMALL),
    "padding a multiple of the stride": (Case((1, 3, 5, 6), 4, 5, 2, 2, 1), SMALL),
    "kernel 7": (Case((1, 2, 3, 5), 4, 7, 2, 3, 1), SMALL),
    "kernel 1x3, stride 2x1": (Case((1, 3, 3, 5), 4, (1, 3), (2, 1), (0, 1)), SMALL),
    "kernel 3x1, stride 1x2": (Case((1, 3, 3, 5), 4, (3, 1), (1, 2), (2, 0), (0, 1)), SMALL),
    "every number different": (Case((1, 3, 4, 5), 4, (4, 5), (2, 3), (1, 2), (1, 0)), SMALL),
}

# Those of the paths on which the backward's kernel differs: where gy is read and the gradient stored.
BACKWARD_PATHS = [
    "one tile exactly, vector stores",
    "scalar stores: odd width",
    "scalar stores: 3 outputs a cell",
    "vector stores: 4 outputs a cell",
    "vector stores past the tile's end",
    "several tiles along every axis",
    "tails along every axis",
    "one pixel",
    "a whole stage at once",
    "empty batch",
    "no bias",
    "1 column a thread",
    "8 columns a thread",
    "1 channel a thread",
    "3 channels a thread",
    "stride 1",
    "stride 1, no padding",
    "stride 3",
    "kernel = stride",
    "kernel smaller than stride",
    "padding beyond the kernel",
    "every number different",
]

SIZES = [
    (Case((3, 17, 29, 31), 33, 3, 2, 1, 1), LARGE),
    (Case((2, 48, 37, 53), 70, 4, 2, 1), LARGE),
    (Case((5, 33, 64, 64), 65, 3), LARGE),
    (Case((4, 20, 40, 25), 50, (4, 5), (2, 3), (1, 2), (1, 0)), tile(4, 1, 4, 8, 2, 8, depth=8)),
    (Case((1, 1, 1, 100_000), 3, 3, 2, 1, 1), LARGE),
    (Case((70_000, 2, 1, 1), 3, 3, 2, 1, 1), LARGE),
    (Case((2, 2048, 8, 8), 64, 3, 2, 1, 1), LARGE),
    (BENCHMARK, LARGE),
]


def run(case, tile, constants, x, weight, bias, offset=0, gy=None):
    """Launch into NaNs and check that nothing around them changed, nor x or gy; gives the output, or with gy the gradient."""
    out, gradient = Guarded(case.output_shape, x.device, offset), () if gy is None else (gy,)
    inputs = [x, *gradient]
    before = [t.clone() for t in inputs]
    described = problem(case, x.device, operation="pre_gradient" if gradient else "forward")
    tiled.filler(described, tile)(x, weight, bias, gradient, out.tensor, constants)
    out.check()
    assert all(torch.equal(bits(t), bits(old)) for t, old in zip(inputs, before, strict=True)), "an input was written"
    return out.tensor


def check(case, tile, device, constants=OPEN, offset=0):
    x, weight, bias = case.draw(device)
    y = run(case, tile, constants, x, weight, bias, offset)
    check_layer(y, x, weight, bias, case.geometry, constants)


def check_gradient(case, tile, device, constants=OPEN, offset=0, gy_offset=0, tensors=None):
    """With gy between guard zones too, of which nothing may reach the gradient."""
    x, weight, bias = tensors or case.draw(device)
    gy = Guarded(case.output_shape, device, gy_offset)
    gy.tensor.normal_()
    g = run(case, tile, constants, x, weight, bias, offset, gy.tensor)
    gy.check()
    check_layer_gradient(g, x, weight, bias, gy.tensor, case.geometry, constants)


@pytest.mark.simulator
@pytest.mark.parametrize(("case", "tile"), PATHS.values(), ids=PATHS)
def test_every_path(case, tile, kernel_device):
    check(case, tile, kernel_device)


@pytest.mark.simulator
@pytest.mark.parametrize("path", BACKWARD_PATHS)
def test_gradient_on_every_path(path, kernel_device):
    check_gradient(*PATHS[path], kernel_device)


@pytest.mark.simulator
@pytest.mark.parametrize("width", [5, 6])
@pytest.mark.parametrize("offset", [1, 2, 3])
def test_misaligned_output(offset, width, kernel_device):
    """Outputs of 10 columns, and of 12, which may be stored by four."""
    check(Case((1, 2, 2, width), 5, 3, 2, 1, 1), SMALL, kernel_device, offset=offset)


@pytest.mark.simulator
@pytest.mark.parametrize("width", [5, 6])
@pytest.mark.parametrize("offsets", [(1, 0), (0, 1), (2, 2), (3, 1)], ids=str)
def test_gradient_with_misaligned_tensors(offsets, width, kernel_device):
    """The gradient's offset and gy's."""
    check_gradient(Case((1, 2, 2, width), 5, 3, 2, 1, 1), SMALL, kernel_device, offset=offsets[0], gy_offset=offsets[1])


@pytest.mark.simulator
def test_misaligned_input(kernel_device):
    case = Case((1, 3, 3, 5), 5, 3, 2, 1, 1)
    x, weight, bias = case.draw(kernel_device)
    shifted = torch.empty(x.numel() + 1, device=kernel_device)[1:].view(x.shape).copy_(x)
    check_layer(run(case, SMALL, OPEN, shifted, weight, bias), x, weight, bias, case.geometry, OPEN)
    check_gradient(case, SMALL, kernel_device, tensors=(shifted, weight, bias))


@pytest.mark.simulator
@pytest.mark.parametrize("offset", [0, 1, 2])
def test_weights_as_they_are(offset, kernel_device):
    """Aligned or not; what is not finite reaches its own output channel alone, from the last tile and the last stage too."""
    case, plain = Case((2, 3, 3, 5), 12, 3, 2, 1, 1), tile(1, 1, 4, 8)
    x, weight, bias = case.draw(kernel_device)
    weight[0, 1, 1, 1], weight[2, 11, 0, 2], bias[10] = float("nan"), float("inf"), float("nan")
    shifted = torch.empty(weight.numel() + offset, device=kernel_device)[offset:].view(weight.shape).copy_(weight)
    assert not plain.packs(case.geometry)
    y, others = run(case, plain, OPEN, x, shifted, bias), [0, *range(2, 10)]
    check_layer(y[:, others], x, weight[:, others], bias[others], case.geometry, OPEN)
    assert y[:, [1, 10, 11]].isnan().any((0, 2, 3)).all()


@pytest.mark.simulator
@pytest.mark.parametrize(
    "constants",
    [
        CLAMPED,
        Constants(0.5, 2.0),
        Constants(-2.0, -3.0),
        Constants(0.0, 1.0, 0.0, 0.25),
        Constants(0.0, 0.0),
        Constants(0.7, 1.0, 0.5, 0.5),
    ],
    ids=str,
)
def test_constants(constants, kernel_device):
    case = Case((1, 2, 2, 5), 5, 3, 2, 1, 1)
    check(case, SMALL, kernel_device, constants)
    check_gradient(case, SMALL, kernel_device, constants)


@pytest.mark.simulator
def test_one_pixel_gives_the_kernel_itself(kernel_device):
    """x = 1 with k3 s2 p1 op1: each output is one weight plus the bias, [[w11, w12], [w21, w22]] + b."""
    case = Case((1, 1, 1, 1), 1, 3, 2, 1, 1)
    _, weight, bias = case.draw(kernel_device)
    y = run(case, SMALL, OPEN, torch.ones(1, 1, 1, 1, device=kernel_device), weight, bias)
    pre = weight[0, 0, 1:, 1:].double() + bias.double()
    want = torch.nn.functional.mish(pre) * OPEN.scale + OPEN.add_value * OPEN.scale
    torch.testing.assert_close(y[0, 0].double(), want, rtol=2e-6, atol=2e-6)


@pytest.mark.simulator
@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_special_values_reach_the_outputs_they_meet_and_no_other(value, kernel_device):
    case = Case((2, 3, 3, 5), 5, 3, 2, 1, 1)
    x, weight, bias = case.draw(kernel_device)
    x[1, 2, 1, 3] = float(value)
    check_layer(run(case, SMALL, OPEN, x, weight, bias), x, weight, bias, case.geometry, OPEN)
    for constants in (OPEN, CLAMPED):
        check_gradient(case, SMALL, kernel_device, constants, tensors=(x, weight, bias))


@pytest.mark.simulator
@pytest.mark.parametrize("constants", [OPEN, CLAMPED], ids=["open", "clamped"])
def test_a_nan_of_gy_stays_where_it_is(constants, kernel_device):
    """And is 0 beyond the clamp's bounds."""
    case = Case((2, 3, 3, 6), 5, 3, 2, 1, 1)
    x, weight, bias = case.draw(kernel_device)
    gy = torch.randn(case.output_shape, device=kernel_device)
    gy[torch.rand_like(gy) < 0.3] = float("nan")
    check_layer_gradient(run(case, SMALL, constants, x, weight, bias, gy=gy), x, weight, bias, gy, case.geometry, constants)


@pytest.mark.simulator
def test_no_gradient_exactly_where_the_output_is_at_a_bound(kernel_device):
    """Zero weights, so that the biases, one a channel, are the pre-activations: neighbours about either bound."""
    z = around_the_bounds(MET, 20 if kernel_device == "cpu" else 10_000).to(kernel_device)
    case = Case((1, 1, 1, 2), len(z), 3, 2, 1, 1)
    x, weight, _ = case.draw(kernel_device)
    gy = torch.ones(case.output_shape, device=kernel_device)
    clamped = run(case, SMALL, MET._replace(scale=1.0), x, 0 * weight, z)
    g = run(case, SMALL, MET, x, 0 * weight, z, gy=gy)
    check_epilogue_gradient(g, z.view(1, -1, 1, 1).expand(case.output_shape), gy, clamped, MET)


@pytest.mark.parametrize(("case", "tile"), SIZES, ids=str)
@pytest.mark.parametrize("constants", [CLAMPED, OPEN], ids=["clamped", "open"])
def test_sizes(case, tile, constants):
    check(case, tile, "cuda", constants)


@pytest.mark.parametrize("case", [*NETWORK_SHAPES, BENCHMARK], ids=str)
def test_chosen_tile(case):
    tile = tiled.tile_for(problem(case, "cuda"))
    if tile is not None:
        check(case, tile, "cuda")


@pytest.mark.parametrize(("case", "tile"), SIZES[:-1], ids=str)
def test_gradient_of_sizes(case, tile):
    for constants in (CLAMPED, OPEN):
        check_gradient(case, tile, "cuda", constants)


@pytest.mark.parametrize("case", [*NETWORK_SHAPES, BENCHMARK], ids=str)
def test_gradient_with_the_chosen_tile(case):
    tile = tiled.tile_for(problem(case, "cuda"))
    if tile is not None:
        check_gradient(case, tile, "cuda", CLAMPED)


def test_gradient_is_bit_equal_when_run_twice():
    case = replace(BENCHMARK, x=(8, 64, 128, 128))
    x, weight, bias = case.draw("cuda")
    gy = torch.randn(case.output_shape, device="cuda")
    assert torch.equal(*(bits(run(case, LARGE, CLAMPED, x, weight, bias, gy=gy)) for _ in range(2)))
