"""``ptx.maths``: each primitive in a kernel of its own, its exact instruction (compiled, without a GPU), and what it does,
against what its docstring says (GPU, and the simulator)."""

import pytest
import torch
from numba import cuda
from numba.cuda import types

from numba_impl.cuda.device import SIMULATED
from numba_impl.cuda.ptx import maths
from tests.cases import bits
from tests.cuda.intrinsics import (
    FLOATS,
    INTS,
    SHORTS,
    around_the_ties,
    assert_equal,
    assert_near,
    assert_same_bits,
    binary,
    check_instructions,
    drawn,
    every_16_bits,
    on_both,
    on_hopper,
    registry,
    results,
    unary,
)

SPECIAL = [0.0, 1e-45, 1e-40, 2.0**-126, 1e-30, 2.0**-24, 0.125, 1.0, 65504.0, 65520.0, 3.4e38, float("inf"), float("nan")]

KERNELS, kernel = registry()


exp2 = unary(kernel, maths.exp2, "ex2.approx.ftz.f32 %, %;", FLOATS, FLOATS)
reciprocal = unary(kernel, maths.reciprocal, "rcp.approx.ftz.f32 %, %;", FLOATS, FLOATS)
maximum = binary(kernel, maths.maximum, "max.NaN.f32 %, %, %;", FLOATS, FLOATS)
minimum = binary(kernel, maths.minimum, "min.NaN.f32 %, %, %;", FLOATS, FLOATS)
bits_of = unary(kernel, maths.bits, "mov.b32 %, %;", FLOATS, INTS)
from_bits = unary(kernel, maths.from_bits, "mov.b32 %, %;", INTS, FLOATS)
bfloat16 = unary(kernel, maths.bfloat16, "cvt.rn.bf16.f32 %, %;", FLOATS, SHORTS)
from_bfloat16 = unary(kernel, maths.from_bfloat16, "mov.b16 z, 0; mov.b32 %, {z, %};", SHORTS, FLOATS)
half = unary(kernel, maths.half, "cvt.rn.f16.f32 %, %;", FLOATS, SHORTS)
from_half = unary(kernel, maths.from_half, "cvt.f32.f16 %, %;", SHORTS, FLOATS)
half2 = binary(kernel, maths.half2, "cvt.rn.f16x2.f32 %, %, %;", FLOATS, INTS)
divide = binary(kernel, maths.divide, "div.u32 %, %, %;", INTS, INTS)

SPLIT = (
    "cvt.rn.f16x2.f32 %, %, %; mov.b32 {a, b}, %; cvt.f32.f16 x, a; cvt.f32.f16 y, b; "
    "sub.f32 x, %, x; sub.f32 y, %, y; cvt.rn.f16x2.f32 %, y, x;"
)


@kernel([SPLIT], FLOATS, FLOATS, INTS, INTS, types.int32)
def split_half2(x, y, high, low, size):
    for i in range(cuda.grid(1), size, cuda.gridsize(1)):
        high[i], low[i] = maths.split_half2(x[i], y[i])


def every_exponent():
    """fp32 of all signs and exponents with drawn mantissas, among them infinities and NaN; in any order."""
    patterns = torch.arange(512) << 23
    drawn = torch.cat([patterns | torch.randint(2**23, (512,)) for _ in range(1 if SIMULATED else 256)])
    special = torch.tensor(SPECIAL)
    patterns = torch.cat([drawn.to(torch.int32), bits(special), bits(-special)])
    return patterns[torch.randperm(len(patterns))].view(torch.float32)


def pairs(packed):
    """[2, n] fp16 from n int32: those in the low halves, then those in the high ones."""
    return packed.view(torch.float16).view(-1, 2).T


@on_both
def test_exp2(kernel_device):
    x = torch.cat([every_exponent(), 300 * torch.rand(512) - 150])
    (got,) = results(exp2, [x], [torch.float32], kernel_device)
    want = x.double().exp2()
    assert_near(got, want, 2.0**-22 * want + 2.0**-126)  # below 2^-126 it may be flushed to zero
    assert (got[x == -float("inf")] == 0).all()


@on_both
def test_reciprocal(kernel_device):
    x = every_exponent()
    x = x[(x == 0) | (x.abs() >= 2.0**-126) | x.isnan()]  # between, the instruction takes it for zero, its twin does not
    (got,) = results(reciprocal, [x], [torch.float32], kernel_device)
    want = 1 / x.double()
    ulp = 2.0 ** (want.abs().log2().floor() - 23)
    assert_near(got, want, ulp + 2.0**-126)


@on_both
@pytest.mark.parametrize(("kernel", "meaning"), [(maximum, torch.maximum), (minimum, torch.minimum)], ids=["maximum", "minimum"])
def test_maximum_and_minimum(kernel, meaning, kernel_device):
    special = torch.tensor([0.0, 1e-40, 1.0, 3.4e38, float("inf"), float("nan")])
    special = torch.cat([special, -special])
    x, y = torch.cat([torch.cartesian_prod(special, special), torch.stack([every_exponent(), every_exponent()], 1)]).T
    (got,) = results(kernel, [x, y], [torch.float32], kernel_device)
    assert_equal(got, meaning(x, y))


@on_both
def test_bits(kernel_device):
    x = every_exponent()
    (got,) = results(bits_of, [x], [torch.int32], kernel_device)
    assert torch.equal(got, bits(x))


@on_both
def test_from_bits(kernel_device):
    x = every_exponent()
    (got,) = results(from_bits, [bits(x)], [torch.float32], kernel_device)
    assert torch.equal(bits(got), bits(x))


@on_both
@pytest.mark.parametrize(("kernel", "dtype"), [(bfloat16, torch.bfloat16), (half, torch.float16)], ids=["bfloat16", "half"])
def test_rounded_to_16_bits(kernel, dtype, kernel_device):
    """To nearest even, beyond the largest to infinity; zeros keep their sign."""
    ties = around_the_ties(dtype)
    x = torch.cat([every_exponent(), ties[torch.randperm(len(ties))[: 4096 if SIMULATED else None]]])
    (got,) = results(kernel, [x], [torch.int16], kernel_device)
    assert_same_bits(got.view(dtype), x.to(dtype))


@on_both
@pytest.mark.parametrize(
    ("kernel", "dtype"), [(from_bfloat16, torch.bfloat16), (from_half, torch.float16)], ids=["from_bfloat16", "from_half"]
)
def test_widened_from_16_bits(kernel, dtype, kernel_device):
    x = every_16_bits()
    (got,) = results(kernel, [x], [torch.float32], kernel_device)
    assert_same_bits(got, x.view(dtype).float())


@on_both
def test_half2(kernel_device):
    values = torch.stack([every_exponent(), every_exponent()])
    (got,) = results(half2, values, [torch.int32], kernel_device)
    assert_equal(pairs(got), values.half())


@on_both
def test_split_half2(kernel_device):
    values = torch.stack([every_exponent(), every_exponent()])
    high, low = map(pairs, results(split_half2, values, [torch.int32, torch.int32], kernel_device))
    assert_equal(high, values.half())
    assert_equal(low, (values - values.half().float()).half())
    in_range = values.abs() <= 65504
    values, sums = values[in_range].double(), (high.double() + low.double())[in_range]
    assert_near(sums, values, (2.0**-22 * values.abs()).clamp(min=2.0**-25))


@on_both
def test_divide(kernel_device):
    edges = torch.tensor([0, 1, 2, 3, 127, 128, 2**24 + 1, 2**31 - 2, 2**31 - 1])
    a, b = (torch.randint(2**31, (512,)) >> torch.randint(31, (512,)) for _ in range(2))
    a, b = torch.cat([torch.cartesian_prod(edges, edges[1:]), torch.stack([a, b.clamp(min=1)], 1)]).T.to(torch.int32)
    (got,) = results(divide, [a, b], [torch.int32], kernel_device)
    assert torch.equal(got, a // b)


# Among a warp's threads.


warp_max = unary(kernel, maths.warp_max, "redux.sync.max.s32 %, %, 0xffffffff;", INTS, INTS)
warp_min = unary(kernel, maths.warp_min, "redux.sync.min.s32 %, %, 0xffffffff;", INTS, INTS)


@on_hopper
@pytest.mark.parametrize(("kernel", "meaning"), [(warp_max, torch.amax), (warp_min, torch.amin)], ids=["warp_max", "warp_min"])
def test_warp_max_and_min(kernel, meaning):
    x = drawn(torch.int32, 64, 32, device="cuda")
    x[:8], x[8:16] = x[:8].abs(), x[:8] | -(2**31)  # of one sign
    (got,) = results(kernel, [x], [torch.int32], "cuda")
    assert torch.equal(got.view(64, 32), meaning(x, 1, keepdim=True).expand(-1, 32).cpu())


@pytest.mark.parametrize("name", KERNELS)
def test_instructions(name, compiler):
    check_instructions(*KERNELS[name])
