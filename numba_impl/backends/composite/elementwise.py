"""The epilogue alone, over any number of fp32 values, in place or not: as fast as a copy.

Grid-stride over 16-byte vectors; what alignment leaves over at either end goes one value at a time.
"""

import functools
from dataclasses import dataclass

from numba import cuda, int64
from numba.cuda import types

from numba_impl import epilogue
from numba_impl.cuda import ptx
from numba_impl.cuda.device import device
from numba_impl.cuda.kernel import Kernel, fp32, multiprocessors

activate = epilogue.build(device, ptx.exp2, ptx.reciprocal, ptx.minimum, ptx.maximum)


@dataclass(frozen=True)
class Config:
    """``threads`` a block, and the most ``blocks`` a multiprocessor is given, one after another."""

    threads: int = 256
    blocks: int = 1024


@functools.lru_cache
def build(config: Config) -> Kernel:
    """The kernel: y[i] = epilogue(x[i]); x and y may be the same memory."""

    @device
    def four(i, x, y, add_value, scale, low, high):
        a, b, c, d = ptx.load4(x, i)
        a = activate(a, add_value, scale, low, high)
        b = activate(b, add_value, scale, low, high)
        c = activate(c, add_value, scale, low, high)
        d = activate(d, add_value, scale, low, high)
        ptx.store4(y, i, a, b, c, d)

    @device
    def one(i, x, y, add_value, scale, low, high):
        y[i] = activate(x[i], add_value, scale, low, high)

    loop = build_loop(four, one)

    def pointwise(x, y, first, end, size, add_value, scale, low, high):
        loop(first, end, size, x, y, add_value, scale, low, high)

    pointer, i, f = types.CPointer(types.float32), types.int64, types.float32
    return Kernel(pointwise, types.void(pointer, pointer, i, i, i, f, f, f, f), config.threads, 1, config)


def build_loop(four, one):
    """A device function of ``(first, end, size, *args)``, the arguments of ``launch_kernel``'s kernel in another order.

    It calls the device functions ``four(i, *args)`` for i = first, first + 4, ... below end, and ``one(i, *args)`` for
    every other i of [0, size).
    """

    @device
    def loop(first, end, size, *args):
        thread = int64(cuda.blockIdx.x) * cuda.blockDim.x + cuda.threadIdx.x
        threads = int64(cuda.gridDim.x) * cuda.blockDim.x
        for i in range(first + 4 * thread, end, 4 * threads):
            four(i, *args)
        for i in range(thread, first, threads):
            one(i, *args)
        for i in range(end + thread, size, threads):
            one(i, *args)

    return loop


def vector_range(size, address, *others):
    """[first, end) that 16-byte accesses to all arrays can cover; empty where they are misaligned differently."""
    if any((address - other) % 16 for other in others):
        return size, size
    first = min(-address % 16 // 4, size)
    return first, first + (size - first) // 4 * 4


def launch(x, y, add_value, scale, min_val=-1.0, max_val=1.0, config=Config()):
    """y = hardtanh(mish(x) + add_value, min_val, max_val) * scale, element by element in memory order.

    ``x`` and ``y``: dense fp32 of the same size on one device, or the same array; tensors or anything
    with ``__cuda_array_interface__``. Raises TypeError for another dtype, ValueError for unequal sizes.
    """
    launch_kernel(build(config), config, {"x": x, "y": y}, add_value, scale, min_val, max_val)


def launch_kernel(kernel, config, arrays, *scalars):
    """Launch ``kernel(*arrays, first, end, size, *scalars)``, whose loop is ``build_loop``'s, over named arrays.

    Raises TypeError unless they are fp32, ValueError unless each has the size of the first.
    """
    arrays = {name: fp32(name, array) for name, array in arrays.items()}
    (leader, array), *others = arrays.items()
    size = array.numel()
    for name, other in others:
        if other.numel() != size:
            raise ValueError(f"{name} must have the {size} values of {leader}, got {other.numel()}")
    first, end = vector_range(size, *(a.data_ptr() for a in arrays.values()))
    steps = max((end - first) // 4, first, size - end)
    blocks = min(-(-steps // config.threads), config.blocks * multiprocessors(array.device))
    if blocks:
        kernel(blocks, *arrays.values(), first, end, size, *scalars)
