"""``unroll``: a device function called with every index, each a constant."""

import pytest
import torch
from numba import cuda, float32
from numba.cuda import types

from numba_impl.cuda.device import device, unroll
from numba_impl.cuda.kernel import Kernel
from tests.cuda.intrinsics import FLOATS, INTS, on_both, start

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
