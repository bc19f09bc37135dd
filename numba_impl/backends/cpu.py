"""CPU: torch's convolution, then the epilogue in one pass, on as many threads as torch uses."""

import functools
import math
import threading
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from numba_impl import epilogue
from numba_impl.backends import reference
from numba_impl.problem import Constants, Problem

CHUNK = 2**20  # values of the pre-activation: 4 MiB; fresh pages for more cost as much as the convolution

# One loop at a time: it has all threads, and not every threading layer of Numba's can be called from two.
_PARALLEL = threading.Lock()

# 2^f for |f| <= 1/2, highest power first: least-squares fit of relative error 2e-9
EXP2 = tuple(np.float32(c) for c in (1.5345773e-4, 1.3399932e-3, 9.6184891e-3, 5.5503286e-2, 2.4022646e-1, 6.9314718e-1, 1.0))


def supports(problem: Problem):
    if problem.device.type != "cpu":
        return False, f"x is on {problem.device}, not on the CPU"
    return problem.plain_fp32()


def run(x, weight, bias, constants: Constants, problem: Problem, gy=None):
    """A few images at a time, so that the pre-activation stays in cache and in memory that the allocator keeps."""
    if gy is not None:
        z = reference.conv_transpose2d(x, weight, bias, problem.geometry)
        return activate_backward(z, reference.laid_out_as(gy, z), constants)
    batch, *image = problem.output_shape
    images = images_at_a_time(image)
    if images >= batch or not x.is_contiguous():
        z = reference.conv_transpose2d(x, weight, bias, problem.geometry)
        return activate(z, z, constants)
    y = torch.empty(problem.output_shape)
    for first in range(0, batch, images):
        part = slice(first, first + images)
        z = reference.conv_transpose2d(x[part], weight, bias, problem.geometry)
        activate(reference.laid_out_as(z, y[part]), y[part], constants)  # channels_last, if the weight is
    return y


def images_at_a_time(image) -> int:
    """How many pre-activations of such a shape make a chunk, at least one."""
    return max(1, CHUNK // max(1, math.prod(image)))


def activate(x, y, constants: Constants):
    """The epilogue from ``x`` into ``y``, which is returned: dense fp32 CPU tensors of the same strides, or one tensor."""
    _run("forward", (x, y), constants)
    return y


def activate_backward(z, gy, constants: Constants):
    """The epilogue's gradient at ``z`` from ``gy`` at its output, in z's memory, which is returned.

    Dense fp32 CPU tensors of the same strides. 0 at the clamp's bounds and beyond, NaN where z is not finite.
    """
    _run("backward", (z, gy), constants)
    return z


def _run(name, tensors, constants):
    """A loop on as many threads as torch uses. On one it starts no thread, which a forked process may not do."""
    import numba

    threads = min(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS)
    flat = [t.detach().as_strided((t.numel(),), (1,)).numpy() for t in tensors]
    numbers = map(np.float32, constants)
    if threads == 1:
        getattr(_loops(parallel=False), name)(*flat, *numbers)
        return
    with _PARALLEL:
        numba.set_num_threads(threads)
        getattr(_loops(parallel=True), name)(*flat, *numbers)


class _Loops(NamedTuple):
    """Compiled loops over flat arrays: ``forward(x, y, *constants)`` into y, ``backward(z, gy, *constants)`` into z."""

    forward: Callable
    backward: Callable


@functools.lru_cache
def _loops(parallel) -> _Loops:
    """Built on first use, since importing Numba takes half a second; each is compiled at its own first call."""
    import numba

    # The default error model tests each division for zero, and the test keeps the loop scalar.
    jit = functools.partial(numba.njit, fastmath={"contract"}, error_model="numpy")

    @jit
    def exp2(x):
        """Polynomial, so that the loop vectorises; x is at most 29, NaN gives a finite number."""
        k = np.floor(x + np.float32(0.5))
        f = x - k
        p = EXP2[0]
        for c in EXP2[1:]:
            p = p * f + c
        bits = np.int32((np.int32(k) + 127) << 23)
        return p * bits.view(np.float32) if x > np.float32(-126) else np.float32(0)

    @jit
    def reciprocal(x):
        return np.float32(1) / x

    @jit
    def minimum(x, y):
        return y if x > y else x

    @jit
    def maximum(x, y):
        return y if x < y else x

    activate_one = epilogue.build(jit, exp2, reciprocal, minimum, maximum)
    gradient = epilogue.build_backward(jit, exp2, reciprocal)

    @jit(parallel=parallel)
    def forward(x, y, add_value, scale, low, high):
        for i in numba.prange(x.size):
            y[i] = activate_one(x[i], add_value, scale, low, high)

    @jit(parallel=parallel)
    def backward(z, gy, add_value, scale, low, high):
        for i in numba.prange(z.size):
            z[i] = gradient(z[i], gy[i], add_value, scale, low, high)

    return _Loops(forward, backward)
