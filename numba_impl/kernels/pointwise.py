"""The epilogue alone, over any number of fp32 values, in place or not: as fast as a copy.

Grid-stride over 16-byte vectors; what alignment leaves over at either end goes one value at a time.
"""

import functools
from dataclasses import dataclass

from numba import cuda, int64
from numba.cuda import types

from numba_impl import epilogue
from numba_impl.kernels import ptx
from numba_impl.kernels.device import device
from numba_impl.launch import Kernel, fp32, multiprocessors

activate = epilogue.build(device, ptx.exp2, ptx.reciprocal, ptx.minimum, ptx.maximum)


@dataclass(frozen=True)
class Config:
    """``threads`` a block, and the most ``blocks`` a multiprocessor is given, one after another."""

    threads: int = 256
    blocks: int = 1024


@functools.lru_cache
def build(config: Config) -> Kernel:
    """The kernel: y[i] = epilogue(x[i]); x and y may be the same memory."""

    def pointwise(x, y, first, end, size, add_value, scale, low, high):
        # 16-byte vectors cover [first, end), scalars [0, first) and [end, size).
        thread = int64(cuda.blockIdx.x) * cuda.blockDim.x + cuda.threadIdx.x
        threads = int64(cuda.gridDim.x) * cuda.blockDim.x
        for i in range(first + 4 * thread, end, 4 * threads):
            a, b, c, d = ptx.load4(x, i)
            a = activate(a, add_value, scale, low, high)
            b = activate(b, add_value, scale, low, high)
            c = activate(c, add_value, scale, low, high)
            d = activate(d, add_value, scale, low, high)
            ptx.store4(y, i, a, b, c, d)
        for i in range(thread, first, threads):
            y[i] = activate(x[i], add_value, scale, low, high)
        for i in range(end + thread, size, threads):
            y[i] = activate(x[i], add_value, scale, low, high)

    pointer, i, f = types.CPointer(types.float32), types.int64, types.float32
    return Kernel(pointwise, types.void(pointer, pointer, i, i, i, f, f, f, f), config.threads, 1)


def vector_range(x_address, y_address, size):
    """[first, end) that 16-byte accesses to both arrays can cover; empty where they are misaligned differently."""
    if (x_address - y_address) % 16:
        return size, size
    first = min(-x_address % 16 // 4, size)
    return first, first + (size - first) // 4 * 4


def launch(x, y, add_value, scale, min_val=-1.0, max_val=1.0, config=Config()):
    """y = hardtanh(mish(x) + add_value, min_val, max_val) * scale, element by element in memory order.

    ``x`` and ``y``: dense fp32 of the same size on one device, or the same array; tensors or anything
    with ``__cuda_array_interface__``. Raises TypeError for another dtype, ValueError for unequal sizes.
    """
    x, y = fp32("x", x), fp32("y", y)
    size = x.numel()
    if y.numel() != size:
        raise ValueError(f"y must have the {size} values of x, got {y.numel()}")
    first, end = vector_range(x.data_ptr(), y.data_ptr(), size)
    steps = max((end - first) // 4, first, size - end)
    blocks = min(-(-steps // config.threads), config.blocks * multiprocessors(x.device))
    if blocks:
        build(config)(blocks, x, y, first, end, size, add_value, scale, min_val, max_val)
