"""Sums of every channel over images and pixels: a bias' gradient. The order of the additions is fixed, so it is deterministic.

A block adds up some pieces of the planes of one channel, each thread on its own, then the threads pairwise.
"""

import torch
from numba import cuda, float32, int32, int64
from numba.cuda import types

from numba_impl import gpu
from numba_impl.cuda.kernel import Kernel, built
from numba_impl.cuda.ptx import memory

THREADS = 256
PIECE = 16 * THREADS  # values of a plane
BLOCKS = 16  # a multiprocessor, about


@built
def build() -> Kernel:
    def channel_sum(g, sums, images, channels, plane, parts, vectors):
        # g [images, channels, plane] fp32; sums [channels, parts]
        partial = cuda.shared.array(THREADS, float32)
        thread, block = int32(cuda.threadIdx.x), int32(cuda.blockIdx.x)
        channel, part = int32(block // parts), int32(block % parts)
        pieces = int64((plane + PIECE - 1) // PIECE)
        a = b = c = d = float32(0)
        for item in range(int64(part), images * pieces, int64(parts)):
            at = (item // pieces * channels + channel) * plane
            first = item % pieces * PIECE
            end = min(first + PIECE, plane)
            if vectors:
                for i in range(first + 4 * thread, end, 4 * THREADS):
                    four = memory.load(g, at + i, 4)
                    a, b, c, d = a + four[0], b + four[1], c + four[2], d + four[3]
            else:
                for i in range(first + thread, end, THREADS):
                    a += memory.load(g, at + i)
        partial[thread] = (a + b) + (c + d)
        cuda.syncthreads()
        half = int32(THREADS // 2)
        while half > 0:
            if thread < half:
                partial[thread] += partial[thread + half]
            cuda.syncthreads()
            half = int32(half // 2)
        if thread == 0:
            sums[block] = partial[0]

    pointer, i, n = types.CPointer(types.float32), types.int32, types.int64
    return Kernel(channel_sum, types.void(pointer, pointer, n, i, n, i, types.boolean), THREADS, 1, config=())


def prepare(device, shape):
    """A function of ``g``, fp32 and contiguous, of this shape [N, C, H, W]: it gives the sums, [C]."""
    images, channels, height, width = shape
    plane = height * width
    pieces = images * -(-plane // PIECE)
    parts = max(1, min(-(-BLOCKS * gpu.of(device).multiprocessors // channels), pieces))
    launch = build().prepare(device, channels * parts, images, channels, plane, parts)

    def run(g):
        sums = torch.empty(channels, parts, dtype=g.dtype, device=g.device)
        launch((g, sums), (plane % 4 == 0 and g.data_ptr() % 16 == 0,))
        return sums.sum(1)

    return run
