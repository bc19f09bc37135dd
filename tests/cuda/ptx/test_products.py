"""``ptx.products``: the registers that a warpgroup gives to another. The products are tested where they are put together, in
``tests/backends/hopper/test_products.py``."""

import pytest
import torch
from numba import cuda, float32, int32

from numba_impl.cuda.device import device, unroll
from numba_impl.cuda.ptx import memory, products
from tests.cuda.intrinsics import FLOATS, THREADS, check_instructions, on_hopper, registry, start

KERNELS, kernel = registry()


# Registers from a warpgroup to another: two blocks of 256 threads to a multiprocessor are 128 registers a thread.

FEWER, MORE = 40, 216
VALUES = 160  # a thread's in registers at a time, more than 128
fewer_registers, more_registers = products.set_registers(FEWER, more=False), products.set_registers(MORE, more=True)


@device
def load_value(i, values, x, at):
    values[i] = memory.load(x, at + i * THREADS)


@device
def store_value(i, values, y, at):
    y[at + i * THREADS] = values[VALUES - 1 - i]


load_values, store_values = unroll(VALUES, load_value), unroll(VALUES, store_value)


@kernel(
    [f"setmaxnreg.dec.sync.aligned.u32 {FEWER};", f"setmaxnreg.inc.sync.aligned.u32 {MORE};"],
    *(FLOATS, FLOATS),
    threads=2 * THREADS,
    blocks=2,
)
def set_registers(x, y):
    """x [1 + VALUES, THREADS]: the first row negated by those who give, the others in reverse by those who take."""
    thread = int32(cuda.threadIdx.x)
    place = int32(thread % THREADS)
    group = cuda.shfl_sync(0xFFFFFFFF, thread // THREADS, 0)  # so that the compiler knows it is the same for a warp
    if group == 0:
        fewer_registers()
        y[place] = -x[place]
    else:
        more_registers()
        values = cuda.local.array(VALUES, float32)
        load_values(values, x, THREADS + place)
        store_values(values, y, THREADS + place)


@on_hopper
def test_set_registers():
    x = torch.randn(1 + VALUES, THREADS, device="cuda")
    y = torch.zeros_like(x)
    start(set_registers, x, y)
    assert torch.equal(y, torch.cat([-x[:1], x[1:].flip(0)]))


@pytest.mark.parametrize("name", KERNELS)
def test_instructions(name, compiler):
    check_instructions(*KERNELS[name])
