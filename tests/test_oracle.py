"""The bounds themselves: fp32 arithmetic keeps them, anything coarser or wrong in one value does not."""

import math

import pytest
import torch

from numba_impl import convolution
from numba_impl.epilogue import MISH_ADD_HARDTANH_SCALE as CHAIN
from numba_impl.oracle import (
    BARE,
    REACHES,
    Errors,
    Gradients,
    PreActivation,
    Wrong,
    check_epilogue,
    check_epilogue_gradient,
    check_layer,
    check_layer_gradient,
    clear_of_edges,
    pre_activation,
    to_tf32,
)
from tests.cases import CLAMPED, MET, OPEN, USUAL, Case

CASES = [Case((2, 64, 6, 6), 8, 3, 2, 1, 1), Case((1, 256, 5, 5), 16, 3), Case((4, 1, 9, 9), 2, 2, 2, bias=False)]


def layer(x, weight, bias, case, constants):
    """The float64 chain, rounded once."""
    pre, _ = pre_activation(x, weight, bias, case.geometry)
    return CHAIN.forward(pre, constants).float()


@pytest.mark.parametrize("constants", [CLAMPED, OPEN], ids=["clamped", "open"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_fp32_passes(case, constants):
    x, weight, bias = case.draw()
    z = convolution.forward(x, weight, bias, case.geometry)
    check_layer(CHAIN.forward(z, constants), x, weight, bias, case.geometry, constants)


@pytest.mark.parametrize(
    "rounded", [to_tf32, lambda t: t.half().float(), lambda t: t.bfloat16().float()], ids=["tf32", "fp16", "bf16"]
)
@pytest.mark.parametrize("constants", [CLAMPED, OPEN], ids=["clamped", "open"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_rounded_operands_fail(case, constants, rounded):
    x, weight, bias = case.draw()
    y = layer(rounded(x), rounded(weight), bias, case, constants)
    with pytest.raises(AssertionError, match="values wrong"):
        check_layer(y, x, weight, bias, case.geometry, constants)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_tf32_passes_where_it_is_allowed(case):
    x, weight, bias = case.draw()
    y = layer(to_tf32(x), to_tf32(weight), bias, case, OPEN)
    check_layer(y, x, weight, bias, case.geometry, OPEN, precision="tf32")


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), 0.1, -0.1], ids=str)
def test_one_wrong_value_fails(wrong):
    x, weight, bias = CASES[0].draw()
    y = layer(x, weight, bias, CASES[0], OPEN)
    y.view(-1)[torch.randint(y.numel(), ())] += wrong
    with pytest.raises(AssertionError, match="1 of 2304 values wrong"):
        check_layer(y, x, weight, bias, CASES[0].geometry, OPEN)


def test_an_infinite_pre_activation_excuses_nothing():
    x, weight, bias = USUAL.draw()
    x[0, 1, 2, 3] = math.inf
    for constants in (CLAMPED, OPEN):
        y = layer(x, weight, bias, USUAL, constants)
        check_layer(y, x, weight, bias, USUAL.geometry, constants)
        with pytest.raises(Wrong):
            check_layer(y.nan_to_num(nan=0.5), x, weight, bias, USUAL.geometry, constants)


def test_special_values_must_be_the_same():
    v = torch.tensor([float("nan"), float("-inf"), float("inf")])
    check_epilogue(torch.tensor([float("nan"), float("nan"), 2.0]), v, CLAMPED)
    check_epilogue(torch.tensor([float("nan"), float("nan"), float("inf")]), v, OPEN)
    for wrong in ([0.0, float("nan"), 2.0], [float("nan"), -2.0, 2.0], [float("nan"), float("nan"), float("nan")]):
        with pytest.raises(AssertionError, match="1 of 3 values wrong"):
            check_epilogue(torch.tensor(wrong), v, CLAMPED)


def test_tf32_rounding():
    x = torch.tensor([1.0, 1 + 2**-11, 1 + 3 * 2**-11, 1 + 2**-11 + 2**-20, -1 - 2**-10])
    assert to_tf32(x).tolist() == [1.0, 1.0, 1 + 2**-9, 1 + 2**-10, -1 - 2**-10]


def test_the_errors_are_told():
    x, weight, bias = USUAL.draw()
    y, want = layer(x, weight, bias, USUAL, OPEN), CHAIN.forward(pre_activation(x, weight, bias, USUAL.geometry)[0], OPEN)
    y[1, 2, 3, 4] += 1e-6
    largest, relative = check_layer(y, x, weight, bias, USUAL.geometry, OPEN)
    assert largest == (y - want).abs().max() and relative == pytest.approx(((y - want).norm() / want.norm()).item())
    assert check_epilogue(torch.zeros(0, 3), torch.zeros(0, 3), OPEN) == Errors(0.0, 0.0)


def test_many_small_errors_fail():
    """Each within its bound, but all of them as large as few should be."""
    x, weight, bias = CASES[0].draw()
    pre = PreActivation.of(x, weight, bias, CASES[0].geometry)
    y = CHAIN.forward(pre.value + 0.7 * pre.error, BARE).float()
    with pytest.raises(Wrong, match="relative L2 error"):
        check_layer(y, x, weight, bias, CASES[0].geometry, BARE)


def test_a_result_of_another_shape_or_dtype_fails():
    x, weight, bias = USUAL.draw()
    y = layer(x, weight, bias, USUAL, OPEN)
    for wrong in (y[:1], y.double(), y[:, :, 1:]):
        with pytest.raises(Wrong, match="a result of shape"):
            check_layer(wrong, x, weight, bias, USUAL.geometry, OPEN)


@pytest.mark.parametrize("reach", REACHES)
def test_what_an_infinite_weight_may_reach(reach):
    """Beyond the image's edge it meets zeros, if the backend multiplies these; never another channel."""
    x, weight, bias = USUAL.draw()
    weight[0, 2, 1, 1] = math.inf
    y = layer(x, weight, bias, USUAL, OPEN)
    check_layer(y, x, weight, bias, USUAL.geometry, OPEN, reach=reach)
    for channel, allowed in ((2, reach != "sum"), (1, False)):
        spread = y.clone()
        spread[:, channel] = math.nan
        if allowed:
            check_layer(spread, x, weight, bias, USUAL.geometry, OPEN, reach=reach)
        else:
            with pytest.raises(Wrong, match="values wrong"):
                check_layer(spread, x, weight, bias, USUAL.geometry, OPEN, reach=reach)


@pytest.mark.parametrize(
    ("image", "column", "allowed"), [(0, 0, ("pixel", "image")), (0, -1, ("image",)), (1, 0, ())], ids=["near", "far", "beside"]
)
@pytest.mark.parametrize("reach", REACHES)
def test_how_far_scales_and_transforms_reach(reach, image, column, allowed):
    """One channel of some pixels is large, and has no part in output channel 2, on which its rounding may tell all the same."""
    x, weight, bias = (t * small for t, small in zip(USUAL.draw(), (1e-6, 1, 1e-6)))
    x[0, 0, :, :4], weight[0, 2] = 3.0, 0.0
    y = layer(x, weight, bias, USUAL, OPEN)
    y[image, 2, 0, column] += 3e-6
    if reach in allowed:
        check_layer(y, x, weight, bias, USUAL.geometry, OPEN, reach=reach)
    else:
        with pytest.raises(Wrong, match="1 of .* values wrong"):
            check_layer(y, x, weight, bias, USUAL.geometry, OPEN, reach=reach)


def test_where_a_sum_may_overflow_anything_within_the_clamp_is_right():
    x, weight, bias = (3e38 * torch.ones(1, 2, 1, 1), torch.tensor([[[[1.0]]], [[[-1.0]]]]), torch.zeros(1))
    geometry = Case((1, 2, 1, 1), 1, 1).geometry
    for value in (2.0, -2.0, 0.5, math.nan):
        check_layer(torch.full((1, 1, 1, 1), value), x, weight, bias, geometry, CLAMPED)
    with pytest.raises(Wrong):
        check_layer(torch.full((1, 1, 1, 1), 2.1), x, weight, bias, geometry, CLAMPED)


def pre_gradient(case, constants):
    """(x, weight, bias, gy, gradient at the pre-activation), the last computed in fp32."""
    x, weight, bias = case.draw()
    gy = torch.randn(case.output_shape)
    z = convolution.forward(x, weight, bias, case.geometry)
    return x, weight, bias, gy, CHAIN.gradient(z, gy, constants)


@pytest.mark.parametrize("constants", [CLAMPED, OPEN, MET], ids=["clamped", "open", "met"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients_at_the_pre_activation(case, constants):
    x, weight, bias, gy, g = pre_gradient(case, constants)
    check_layer_gradient(g, x, weight, bias, gy, case.geometry, constants)
    rounded = CHAIN.gradient(convolution.forward(to_tf32(x), to_tf32(weight), bias, case.geometry), gy, constants)
    check_layer_gradient(rounded, x, weight, bias, gy, case.geometry, constants, precision="tf32")
    wrong = torch.where(g.abs() == g.abs().max(), 1.001 * g, g)  # the smallest may be lost in what rounding allows
    for bad in (rounded, wrong, g.masked_fill(g == g.max(), 0), g.masked_fill(g == g.min(), math.nan)):
        with pytest.raises(Wrong, match="values wrong"):
            check_layer_gradient(bad, x, weight, bias, gy, case.geometry, constants)


def test_no_gradient_at_the_clamps_bound():
    z, gy = torch.tensor([0.0, 5.0, -1.0]), torch.ones(3)
    clamped = CHAIN.forward(z, CLAMPED._replace(scale=1.0))
    g = CHAIN.gradient(z, gy, CLAMPED)
    assert g[1] == 0
    check_epilogue_gradient(g, z, gy, clamped, CLAMPED)
    for place in range(3):
        wrong = g.clone()
        wrong[place] += 1e-5
        with pytest.raises(Wrong, match="1 of 3 values wrong"):
            check_epilogue_gradient(wrong, z, gy, clamped, CLAMPED)


def gradients_of(case, constants, x, weight, bias, gy, rounded=lambda t: t):
    """Those of (x, weight, bias) in fp32, with rounded factors."""
    z = convolution.forward(rounded(x), rounded(weight), bias, case.geometry)
    g = CHAIN.gradient(z, gy, constants)
    factors = (rounded(t) for t in (g, x, weight))
    return *convolution.gradients(*factors, case.geometry, True, True), None if bias is None else g.sum((0, 2, 3))


@pytest.mark.parametrize("constants", [CLAMPED, OPEN], ids=["clamped", "open"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients(case, constants):
    x, weight, bias = case.draw()
    gy = clear_of_edges(torch.randn(case.output_shape), x, weight, bias, case.geometry, constants, "tf32")
    operands = x, weight, bias, gy
    strict, lax = (Gradients.of(*operands, case.geometry, constants, precision) for precision in ("fp32", "tf32"))
    found, rounded = gradients_of(case, constants, *operands), gradients_of(case, constants, *operands, to_tf32)
    assert strict.check(found).relative < 1e-5 and lax.check(rounded).relative < 1e-2
    assert strict.check((None, None, None)) == (0, 0)
    with pytest.raises(Wrong, match="values of the gradient of x wrong"):
        strict.check(rounded)
    for place, name in list(enumerate(("x", "weight", "bias")))[: 2 + case.bias]:
        for factor in (1.002, math.nan):
            wrong = [gradient if gradient is None else gradient.clone() for gradient in found]
            wrong[place].view(-1)[wrong[place].abs().argmax()] *= factor
            with pytest.raises(Wrong, match=f"1 of .* values of the gradient of {name} wrong"):
                strict.check(wrong)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients_where_rounding_decides_on_the_clamp(case):
    x, weight, bias = case.draw()
    operands = x, weight, bias, torch.randn(case.output_shape)
    Gradients.of(*operands, case.geometry, CLAMPED).check(gradients_of(case, CLAMPED, *operands))
    Gradients.of(*operands, case.geometry, CLAMPED, "tf32").check(gradients_of(case, CLAMPED, *operands, to_tf32))


def test_where_gradients_are_cleared():
    """At either bound of the clamp, within rounding, and nowhere else."""
    x, weight, bias = CASES[0].draw()
    gy, geometry = torch.ones(CASES[0].output_shape), CASES[0].geometry
    constants = MET._replace(add_value=0.0)
    bias[:3] = torch.tensor([0.0, 1.2, 5.0])
    weight[:, :3] = 0
    value = torch.nn.functional.mish(bias[1]).item()
    cleared = clear_of_edges(gy, x, weight, bias, geometry, constants._replace(max_val=value))
    assert (cleared[:, 1] == 0).all() and (cleared[:, [0, 2]] == 1).all()
    assert (cleared[:, 3:] == 1).float().mean() > 0.99
    assert (clear_of_edges(gy, x, weight, bias, geometry, OPEN) == 1).all() and (gy == 1).all()


def test_parts_come_to_the_whole(monkeypatch):
    """A few images at a time are checked as all at once."""
    x, weight, bias, gy, g = pre_gradient(CASES[2], OPEN)
    y = layer(x, weight, bias, CASES[2], OPEN)

    def found():
        operands, settings = (x, weight, bias), (CASES[2].geometry, OPEN)
        check_layer_gradient(g, *operands, gy, *settings)
        cleared = clear_of_edges(gy, *operands, *settings)
        return check_layer(y, *operands, *settings), Gradients.of(*operands, gy, *settings), cleared

    whole = found()
    monkeypatch.setattr("numba_impl.oracle.CHUNK", 3 * g[0].numel())
    parts = found()
    torch.testing.assert_close(whole, parts)


narrow = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)


@narrow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_16_bits_are_rounded_as_often_as_is_said(case, dtype):
    tensors = case.draw(dtype=dtype)
    z, _ = pre_activation(*tensors, case.geometry)
    once, twice = (CHAIN.forward(t.double(), OPEN).to(dtype) for t in (z, z.to(dtype)))
    check_layer(once, *tensors, case.geometry, OPEN)
    check_layer(twice, *tensors, case.geometry, OPEN, between=dtype)
    with pytest.raises(Wrong, match="values wrong"):
        check_layer(twice, *tensors, case.geometry, OPEN)
    wrong = once.clone()
    wrong.view(-1)[once.abs().argmax()] *= 1 + 4 * torch.finfo(dtype).eps
    with pytest.raises(Wrong, match="1 of .* values wrong"):
        check_layer(wrong, *tensors, case.geometry, OPEN, between=dtype)


@narrow
def test_gradients_of_leaves_that_autocast_casts(dtype):
    """Of any dtype, and rounded to that, too."""
    case = CASES[0]
    x, weight, bias, gy = *case.draw(dtype=dtype), torch.randn(case.output_shape).to(dtype)
    gy = clear_of_edges(gy, x, weight, bias, case.geometry, OPEN)
    found = gradients_of(case, OPEN, *(t.float() for t in (x, weight, bias, gy)))
    bounds = Gradients.of(x, weight, bias, gy, case.geometry, OPEN)
    for leaves in (torch.float32, torch.bfloat16, torch.float16):
        bounds.check([g.to(dtype).to(leaves) for g in found])
    coarse = torch.bfloat16 if dtype == torch.float16 else torch.float8_e4m3fn
    with pytest.raises(Wrong, match="values of the gradient of x wrong"):
        bounds.check([g.to(coarse).float() for g in found])


@pytest.mark.parametrize(("dtype", "leaves"), [(torch.float16, torch.float32), (torch.bfloat16, torch.float16)], ids=str)
def test_where_a_gradient_may_overflow_anything_is_right(dtype, leaves):
    """On its way as fp16, or in the leaf's dtype."""
    x, weight, bias, gy = (torch.full(shape, 1.0, dtype=dtype) for shape in [(1, 1, 1, 1), (1, 1, 1, 1), (1,), (1, 1, 1, 1)])
    infinite, geometry = torch.full_like(x, math.inf, dtype=leaves), Case((1, 1, 1, 1), 1, 1).geometry
    Gradients.of(x, weight, bias, gy, geometry, OPEN._replace(scale=1e5)).check((infinite, None, None))
    with pytest.raises(Wrong, match="gradient of x wrong"):
        Gradients.of(x, weight, bias, gy, geometry, OPEN).check((infinite, None, None))
