"""The bounds themselves: fp32 arithmetic keeps them, anything coarser or wrong in one value does not."""

import pytest
import torch

from numba_impl.backends import reference
from tests.accuracy import check_epilogue, check_layer, pre_activation, to_tf32
from tests.cases import CLAMPED, OPEN, Case

CASES = [Case((2, 64, 6, 6), 8, 3, 2, 1, 1), Case((1, 256, 5, 5), 16, 3), Case((4, 1, 9, 9), 2, 2, 2, bias=False)]


def layer(x, weight, bias, case, constants):
    """The float64 chain, rounded once."""
    pre, _ = pre_activation(x, weight, bias, case.geometry)
    return reference.mish_add_hardtanh_scale(pre, constants).float()


@pytest.mark.parametrize("constants", [CLAMPED, OPEN], ids=["clamped", "open"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_fp32_passes(case, constants):
    x, weight, bias = case.draw()
    z = reference.conv_transpose2d(x, weight, bias, case.geometry)
    check_layer(reference.mish_add_hardtanh_scale(z, constants), x, weight, bias, case.geometry, constants)


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
