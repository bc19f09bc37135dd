"""``values``: elements of every dtype widened, narrowed and rounded in a kernel, beside torch (GPU, and the simulator)."""

import re

import pytest
import torch
from numba import cuda
from numba.cuda import types

from numba_impl.cuda import values
from numba_impl.cuda.device import SIMULATED
from numba_impl.cuda.kernel import Kernel
from tests.cuda.intrinsics import FLOATS, THREADS, around_the_ties, assert_same_bits, every_16_bits, on_both, results

NARROW = [torch.bfloat16, torch.float16]

every_dtype = pytest.mark.parametrize("dtype", [torch.float32, *NARROW], ids=str)


def build(dtype):
    """The kernel of every function: x widened, that narrowed again; z narrowed, and rounded."""
    element, _, widen, narrow, rounded = values.of(dtype)

    def function(x, z, wide, again, narrowed, kept, size):
        for i in range(cuda.grid(1), size, cuda.gridsize(1)):
            wide[i] = widen(x[i])
            again[i] = narrow(widen(x[i]))
            narrowed[i] = narrow(z[i])
            kept[i] = rounded(z[i])

    elements = types.CPointer(element)
    return Kernel(function, types.void(elements, FLOATS, FLOATS, elements, elements, FLOATS, types.int32), THREADS, 1)


@on_both
@every_dtype
def test_as_torch_converts(dtype, kernel_device):
    if dtype == torch.float32:
        x, z = torch.randn(2, 512)
    else:
        z = around_the_ties(dtype)
        count = 4096 if SIMULATED else 2**16
        x, z = every_16_bits().view(dtype)[:count], z[torch.randperm(len(z))[:count]]
    wide, again, narrowed, kept = results(build(dtype), [x, z], [torch.float32, dtype, dtype, torch.float32], kernel_device)
    assert_same_bits(wide, x.float())
    assert_same_bits(again, x)
    assert_same_bits(narrowed, z.to(dtype))
    assert_same_bits(kept, z.to(dtype).float())


@every_dtype
def test_sizes(dtype):
    found = values.of(dtype)
    assert found.bytes == dtype.itemsize == found.type.bitwidth // 8
    assert found.vector * dtype.itemsize == 16


@every_dtype
def test_conversions_are_of_the_dtype(dtype, compiler):
    """One of the other dtype of 16 bits would compile as well."""
    found = re.findall(r"cvt\S*?(bf16|f16)", build(dtype).ptx((9, 0)))
    assert set(found) == {torch.float32: set(), torch.bfloat16: {"bf16"}, torch.float16: {"f16"}}[dtype]


def test_of_no_other_dtype():
    with pytest.raises(KeyError):
        values.of(torch.float64)
