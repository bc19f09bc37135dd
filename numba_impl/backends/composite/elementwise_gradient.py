"""The epilogue's gradient alone, over any number of fp32 values, in place or not: as fast as its three accesses to memory."""

import functools

from numba.cuda import types

from numba_impl import epilogue
from numba_impl.backends.composite.elementwise import Config, build_loop, launch_kernel
from numba_impl.cuda import ptx
from numba_impl.cuda.device import device
from numba_impl.cuda.kernel import Kernel

CONFIG = Config()

gradient = epilogue.build_backward(device, ptx.exp2, ptx.reciprocal)


@functools.lru_cache
def build(config: Config) -> Kernel:
    """The kernel: g[i] = gradient(z[i], gy[i]); g may be the memory of z or of gy."""

    @device
    def four(i, z, gy, g, add_value, scale, low, high):
        za, zb, zc, zd = ptx.load4(z, i)
        a, b, c, d = ptx.load4(gy, i)
        a = gradient(za, a, add_value, scale, low, high)
        b = gradient(zb, b, add_value, scale, low, high)
        c = gradient(zc, c, add_value, scale, low, high)
        d = gradient(zd, d, add_value, scale, low, high)
        ptx.store4(g, i, a, b, c, d)

    @device
    def one(i, z, gy, g, add_value, scale, low, high):
        g[i] = gradient(z[i], gy[i], add_value, scale, low, high)

    loop = build_loop(four, one)

    def pointwise_backward(z, gy, g, first, end, size, add_value, scale, low, high):
        loop(first, end, size, z, gy, g, add_value, scale, low, high)

    pointer, i, f = types.CPointer(types.float32), types.int64, types.float32
    return Kernel(pointwise_backward, types.void(pointer, pointer, pointer, i, i, i, f, f, f, f), config.threads, 1, config)


def launch(z, gy, g, add_value, scale, min_val=-1.0, max_val=1.0, config=CONFIG):
    """g = gy * the derivative at z of hardtanh(mish(z) + add_value, min_val, max_val) * scale, by memory order.

    ``z``, ``gy`` and ``g``: dense fp32 of the same size on one device, of which ``g`` may be ``z`` or ``gy``; tensors or
    anything with ``__cuda_array_interface__``. 0 at both bounds of the clamp and beyond them, NaN where z is not finite.
    Raises TypeError for another dtype, ValueError for unequal sizes.
    """
    launch_kernel(build(config), config, {"z": z, "gy": gy, "g": g}, add_value, scale, min_val, max_val)
