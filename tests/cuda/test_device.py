"""``unroll``: a device function called with every index, each a constant. ``each``: one called with every pair of two tuples."""

import pytest
import torch
from numba import cuda, float32
from numba.cuda import types

from numba_impl.cuda.device import device, each, unroll
from numba_impl.cuda.kernel import Kernel
from numba_impl.cuda.ptx import memory
from tests.cuda.intrinsics import FLOATS, INTS, SHORTS, on_both, start

COUNT = 200  # past what LLVM unrolls


@device
def read(i, x, values, factor):
    values[i] = x[i] * factor


@device
def write(i, values, y):
    y[i] = values[COUNT - 1 - i]


read_all, write_all = unroll(COUNT, read), unroll(COUNT, write)


def reverse_and_double(x, y):
    values = cuda.local.array(COUNT, float32)
    read_all(x, values, float32(2))
    write_all(values, y)


REVERSE = Kernel(reverse_and_double, types.void(FLOATS, FLOATS), 1, 1)


@on_both
def test_unroll(kernel_device):
    x = torch.randn(COUNT, device=kernel_device)
    y = torch.zeros_like(x)
    start(REVERSE, x, y)
    assert torch.equal(y, 2 * x.flip(0))


def test_unrolled_indices_are_constants(compiler):
    ptx = REVERSE.ptx((9, 0))
    assert "__local_depot" not in ptx, "keeps an array in local memory"
    assert ptx.count("ld.global") == ptx.count("st.global") == COUNT


@pytest.mark.parametrize("count", [0, 1, 3])
def test_unroll_calls_as_often_as_it_says(count, compiler):
    @device
    def add(i, total):
        total[i] += 1

    add_all = unroll(count, add)

    def function(total):
        add_all(total)

    assert Kernel(function, types.void(INTS), 1, 1).ptx((9, 0)).count("st.global") == count


def build_of_pairs(count):
    """The kernel y = x * first + n * second of tuples of two types, which are not those of the result."""

    @device
    def body(a, b, factors, n):
        return float32(a) * factors[0] + float32(b) * factors[1] + n

    of_each = each(body)

    def function(x, n, y):
        memory.store(y, 0, of_each(memory.load(x, 0, count), memory.load(n, 0, count), (float32(2), float32(-3)), float32(0.5)))

    return Kernel(function, types.void(FLOATS, SHORTS, FLOATS), 1, 1)


@on_both
@pytest.mark.parametrize("count", [1, 2, 4])
def test_each(count, kernel_device):
    x = torch.randint(-100, 100, (count,), device=kernel_device).float()
    n = torch.randint(-100, 100, (count,), device=kernel_device).to(torch.int16)
    y = torch.zeros_like(x)
    start(build_of_pairs(count), x, n, y)
    assert torch.equal(y, 2 * x - 3 * n + 0.5)


def test_each_calls_as_often_as_the_tuples_are_long(compiler):
    ptx = build_of_pairs(4).ptx((9, 0))
    assert ptx.count("cvt.rn.f32.s16") == 4 and "__local_depot" not in ptx and "call" not in ptx


@pytest.mark.parametrize("counts", [(2, 4), (4, 2)], ids=str)
def test_each_refuses_tuples_of_two_lengths(counts, compiler):
    add_each = each(device(lambda a, b: a + b))
    first, second = counts

    def function(x, y):
        memory.store(y, 0, add_each(memory.load(x, 0, first), memory.load(x, 0, second)))

    with pytest.raises(Exception, match="shorter|longer"):
        Kernel(function, types.void(INTS, INTS), 1, 1).ptx((9, 0))
