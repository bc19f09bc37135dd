"""Sums of every channel over images and pixels: a bias' gradient. The order of the additions is fixed, so it is deterministic.

A block adds up some pieces of the planes of one channel, each thread on its own, then the threads pairwise.
"""

import torch
from numba import cuda, float32, int32, int64
from numba.cuda import types

from numba_impl import gpu
from numba_impl.cuda import values
from numba_impl.cuda.device import device, unroll
from numba_impl.cuda.kernel import Kernel, built
from numba_impl.cuda.ptx import memory

THREADS = 256
PIECE = 16 * THREADS  # values of a plane
BLOCKS = 16  # a multiprocessor, about


@built
def build(dtype) -> Kernel:
    element, _, widen, _, _ = values.of(dtype)
    VECTOR = values.of(dtype).vector

    @device
    def add(k, sums, found):
        sums[k] += widen(found[k])

    @device
    def clear(k, sums):
        sums[k] = float32(0)

    add_each, clear_all = unroll(VECTOR, add), unroll(VECTOR, clear)

    def channel_sum(g, sums, images, channels, plane, parts, vectors):
        # g [images, channels, plane]; sums [channels, parts] fp32
        partial, own = cuda.shared.array(THREADS, float32), cuda.local.array(VECTOR, float32)
        thread, block = int32(cuda.threadIdx.x), int32(cuda.blockIdx.x)
        channel, part = int32(block // parts), int32(block % parts)
        pieces = int64((plane + PIECE - 1) // PIECE)
        clear_all(own)
        for item in range(int64(part), images * pieces, int64(parts)):
            at = (item // pieces * channels + channel) * plane
            first = item % pieces * PIECE
            end = min(first + PIECE, plane)
            if vectors:
                for i in range(first + VECTOR * thread, end, VECTOR * THREADS):
                    add_each(own, memory.load(g, at + i, VECTOR))
            else:
                for i in range(first + thread, end, THREADS):
                    own[0] += widen(memory.load(g, at + i))
        total = float32(0)
        for k in range(VECTOR):
            total += own[k]
        partial[thread] = total
        cuda.syncthreads()
        half = int32(THREADS // 2)
        while half > 0:
            if thread < half:
                partial[thread] += partial[thread + half]
            cuda.syncthreads()
            half = int32(half // 2)
        if thread == 0:
            sums[block] = partial[0]

    g, sums, i, n = types.CPointer(element), types.CPointer(types.float32), types.int32, types.int64
    return Kernel(channel_sum, types.void(g, sums, n, i, n, i, types.boolean), THREADS, 1, config=(str(dtype),))


def prepare(device, shape, dtype):
    """A function of ``g``, contiguous, of this shape [N, C, H, W] and dtype: it gives the sums, [C] fp32."""
    images, channels, height, width = shape
    plane, vector = height * width, values.of(dtype).vector
    pieces = images * -(-plane // PIECE)
    parts = max(1, min(-(-BLOCKS * gpu.of(device).multiprocessors // channels), pieces))
    launch = build(dtype).prepare(device, channels * parts, images, channels, plane, parts)

    def run(g):
        sums = torch.empty(channels, parts, dtype=torch.float32, device=g.device)
        launch((g, sums), (plane % vector == 0 and g.data_ptr() % 16 == 0,))
        return sums.sum(1)

    return run
