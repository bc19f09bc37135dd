"""Every primitive of ``ptx`` that any GPU has, in a kernel of its own: its exact instruction (compiled, without a GPU),
and what it does, against what its docstring says (GPU, and the simulator where the primitive has a Python twin)."""

import pytest
import torch
from numba import cuda, float32, int32
from numba.cuda import types

from numba_impl.cuda import ptx
from numba_impl.cuda.device import SIMULATED
from tests.cases import SENTINEL, bits
from tests.cuda.intrinsics import (
    FLOATS,
    INTS,
    THREADS,
    assert_equal,
    assert_near,
    binary,
    check_instructions,
    on_both,
    registry,
    results,
    unary,
)

SPECIAL = [0.0, 1e-45, 1e-40, 2.0**-126, 1e-30, 2.0**-24, 0.125, 1.0, 65504.0, 65520.0, 3.4e38, float("inf"), float("nan")]

KERNELS, kernel = registry()


# Arithmetic, element by element.


exp2 = unary(kernel, "exp2", "ex2.approx.ftz.f32 %, %;", FLOATS, FLOATS)
reciprocal = unary(kernel, "reciprocal", "rcp.approx.ftz.f32 %, %;", FLOATS, FLOATS)
maximum = binary(kernel, "maximum", "max.NaN.f32 %, %, %;", FLOATS, FLOATS)
minimum = binary(kernel, "minimum", "min.NaN.f32 %, %, %;", FLOATS, FLOATS)
bits_of = unary(kernel, "bits", "mov.b32 %, %;", FLOATS, INTS)
from_bits = unary(kernel, "from_bits", "mov.b32 %, %;", INTS, FLOATS)
half2 = binary(kernel, "half2", "cvt.rn.f16x2.f32 %, %, %;", FLOATS, INTS)
divide = binary(kernel, "divide", "div.u32 %, %, %;", INTS, INTS)

SPLIT = (
    "cvt.rn.f16x2.f32 %, %, %; mov.b32 {a, b}, %; cvt.f32.f16 x, a; cvt.f32.f16 y, b; "
    "sub.f32 x, %, x; sub.f32 y, %, y; cvt.rn.f16x2.f32 %, y, x;"
)


@kernel([SPLIT], FLOATS, FLOATS, INTS, INTS, types.int32)
def split_half2(x, y, high, low, size):
    i = cuda.grid(1)
    if i < size:
        high[i], low[i] = ptx.split_half2(x[i], y[i])


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


# Loads, stores and copies. Elements change places, so that none is right by having stayed where it was.


@kernel(["ld.global.?32 %, [%];"], FLOATS, FLOATS, types.int32)
def load(x, y, size):
    i = cuda.grid(1)
    if i < size:
        y[i] = ptx.load(x, size - 1 - i)


@kernel(["ld.global.v4.?32 {%, %, %, %}, [%];"], FLOATS, FLOATS)
def load4(x, y):
    i = int32(cuda.threadIdx.x)
    y[4 * i], y[4 * i + 1], y[4 * i + 2], y[4 * i + 3] = ptx.load4(x, 4 * (THREADS - 1 - i))


@kernel(["st.global.v4.?32 [%], {%, %, %, %};"], FLOATS, FLOATS)
def store4(x, y):
    i = int32(cuda.threadIdx.x)
    ptx.store4(y, 4 * (THREADS - 1 - i), x[4 * i], x[4 * i + 1], x[4 * i + 2], x[4 * i + 3])


@kernel(["ld.shared.?32 %, [%];", "ld.shared.v4.?32 {%, %, %, %}, [%];", "st.shared.v4.?32 [%], {%, %, %, %};"], FLOATS, FLOATS)
def vectors_in_shared(x, y):
    """x through shared memory: all vectors in reverse, then the last values in reverse."""
    shared = cuda.shared.array(0, float32)
    i = int32(cuda.threadIdx.x)
    ptx.store4(shared, 4 * i, x[4 * i], x[4 * i + 1], x[4 * i + 2], x[4 * i + 3])
    cuda.syncthreads()
    a, b, c, d = ptx.load4(shared, 4 * (THREADS - 1 - i))
    y[4 * i], y[4 * i + 1], y[4 * i + 2], y[4 * i + 3] = a, b, c, d
    y[4 * THREADS + i] = ptx.load(shared, 4 * THREADS - 1 - i)


@kernel(
    ["cp.async.ca.shared.global [%], [%], 4, p;", "cp.async.wait_all;"],
    *(FLOATS, INTS, INTS, FLOATS, types.int64),
)
def copy_async(x, offsets, keep, y, base):
    shared = cuda.shared.array(0, float32)
    i = int32(cuda.threadIdx.x)
    shared[i] = float32(SENTINEL)
    cuda.syncthreads()
    ptx.copy_async(shared, THREADS - 1 - i, x, base, offsets[i], keep[i] != 0)
    ptx.copy_wait()
    cuda.syncthreads()
    y[i] = shared[i]


@kernel(["cp.async.cg.shared.global [%], [%], 16;", "cp.async.wait_all;"], FLOATS, INTS, FLOATS, types.int64)
def copy_async4(x, offsets, y, base):
    shared = cuda.shared.array(0, float32)
    i = int32(cuda.threadIdx.x)
    ptx.copy_async4(shared, 4 * (THREADS - 1 - i), x, base, offsets[i])
    ptx.copy_wait()
    cuda.syncthreads()
    for j in range(4):
        y[4 * i + j] = shared[4 * i + j]


@kernel(
    ["cp.async.cg.shared.global [%], [%], 16, p;", "cp.async.wait_all;"],
    *(FLOATS, INTS, INTS, FLOATS, types.int64),
)
def copy_async4_or_zero(x, offsets, keep, y, base):
    shared = cuda.shared.array(0, float32)
    i = int32(cuda.threadIdx.x)
    for j in range(4):
        shared[4 * i + j] = float32(SENTINEL)
    cuda.syncthreads()
    ptx.copy_async4_or_zero(shared, 4 * (THREADS - 1 - i), x, base, offsets[i], keep[i] != 0)
    ptx.copy_wait()
    cuda.syncthreads()
    for j in range(4):
        y[4 * i + j] = shared[4 * i + j]


def reverse4(x):
    """The values four by four, the last four first."""
    return x.view(-1, 4).flip(0).flatten()


@on_both
def test_load(kernel_device):
    x = torch.randn(300)
    (got,) = results(load, [x], [torch.float32], kernel_device)
    assert torch.equal(got, x.flip(0))


@on_both
@pytest.mark.parametrize("kernel", [load4, store4], ids=["load4", "store4"])
def test_load4_and_store4(kernel, kernel_device):
    x = torch.randn(4 * THREADS, device=kernel_device)
    y = torch.zeros_like(x)
    kernel(1, x, y)
    assert torch.equal(y, reverse4(x))


@on_both
def test_vectors_in_shared_memory(kernel_device):
    x = torch.randn(4 * THREADS, device=kernel_device)
    y = torch.zeros(5 * THREADS, device=kernel_device)
    vectors_in_shared(1, x, y, shared_bytes=16 * THREADS)
    assert torch.equal(y, torch.cat([reverse4(x), x.flip(0)[:THREADS]]))


@on_both
def test_copy_async(kernel_device):
    x, base = torch.randn(1000, device=kernel_device), 400
    offsets = torch.randint(-base, 1000 - base, (THREADS,), dtype=torch.int32, device=kernel_device)
    keep = torch.arange(THREADS, dtype=torch.int32, device=kernel_device) % 3
    want = torch.where(keep != 0, x[(base + offsets).long()], 0.0).flip(0)
    offsets[keep == 0] = 2**31 - 1  # nothing is read
    y = torch.full((THREADS,), float("nan"), device=kernel_device)
    copy_async(1, x, offsets, keep, y, base, shared_bytes=4 * THREADS)
    assert torch.equal(y, want)


@on_both
def test_copy_async4(kernel_device):
    x, base = torch.randn(4000, device=kernel_device), 1600
    offsets = 4 * torch.randint(-400, 600, (THREADS,), dtype=torch.int32, device=kernel_device)
    y = torch.full((4 * THREADS,), float("nan"), device=kernel_device)
    copy_async4(1, x, offsets, y, base, shared_bytes=16 * THREADS)
    places = base + offsets[:, None] + torch.arange(4, device=kernel_device)
    assert torch.equal(y, x[places].flip(0).flatten())


@on_both
def test_copy_async4_or_zero(kernel_device):
    x, base = torch.randn(4000, device=kernel_device), 1600
    offsets = 4 * torch.randint(-400, 600, (THREADS,), dtype=torch.int32, device=kernel_device)
    keep = torch.arange(THREADS, dtype=torch.int32, device=kernel_device) % 3
    places = base + offsets[:, None] + torch.arange(4, device=kernel_device)
    want = torch.where(keep[:, None] != 0, x[places], 0.0).flip(0).flatten()
    offsets[keep == 0] = 2**31 - 4  # nothing is read
    y = torch.full((4 * THREADS,), float("nan"), device=kernel_device)
    copy_async4_or_zero(1, x, offsets, keep, y, base, shared_bytes=16 * THREADS)
    assert torch.equal(y, want)


@pytest.mark.parametrize("name", KERNELS)
def test_instructions(name, compiler):
    check_instructions(*KERNELS[name])
