"""Weights for the Hopper kernel: scaled, split into fp16 hi + lo, and laid out as its shared memory wants them.

It runs before each call of the layer, on the same stream, so that no change of the weights can be
missed, whoever makes it (an optimiser, ``weight.data``, a replayed graph), and nothing waits. A block
has one output channel, which has a scale of its own: the largest |w| becomes 2^14 ... 2^15.

It also puts the tensor map of x, its arguments, into global memory. The bulk copy engine reads a map from there or from a
kernel's parameters; Numba gives no address of a parameter, and any other way to global memory is one more launch or copy.
"""

import torch
from numba import cuda, float32, int32
from numba.cuda import types

from numba_impl.backends.hopper.scaling import MAX_SHIFT, power
from numba_impl.backends.hopper.schedule import TAPS
from numba_impl.cuda.device import device, unroll
from numba_impl.cuda.kernel import Kernel, built
from numba_impl.cuda.ptx import maths, memory
from numba_impl.cuda.tensor_map import WORDS

THREADS = 128
TOP = 14  # exponent that the largest |w| of a channel is given


def shapes(in_channels, out_channels):
    """The shapes of packed, [hi and lo, taps, padded in_channels / 8, out_channels, 4] pairs of fp16, factors and x_map."""
    packed = 2, TAPS, -(-in_channels // 16) * 2, out_channels, 4
    return packed, (out_channels,), (WORDS,)


def empty(in_channels, out_channels, device):
    """(packed, factors, x_map) for the kernel to fill."""
    dtypes = torch.int32, torch.float32, torch.int64
    return [torch.empty(*shape, dtype=dtype, device=device) for shape, dtype in zip(shapes(in_channels, out_channels), dtypes)]


@built
def build() -> Kernel:
    @device
    def store_word(i, x_map, words):
        x_map[i] = words[i]

    store_words = unroll(WORDS, store_word)

    def split(weight, packed, factors, x_map, in_channels, out_channels, words):
        # weight [in_channels, out_channels, 9] fp32; packed [2 (hi, lo), 9, padded / 8, out_channels, 4] pairs of fp16
        largest = cuda.shared.array(THREADS, int32)
        thread, channel = int32(cuda.threadIdx.x), int32(cuda.blockIdx.x)
        if thread == 0 and channel == 0:
            store_words(x_map, words)
        size = int32(in_channels * TAPS)
        own = int32(0)
        for e in range(thread, size, THREADS):
            value = memory.load(weight, (e // TAPS * out_channels + channel) * TAPS + e % TAPS)
            own = max(own, maths.bits(value) & 0x7FFFFFFF)
        largest[thread] = own
        cuda.syncthreads()
        for other in range(THREADS):
            own = max(own, largest[other])
        shift = int32(min(max(TOP + 127 - (own >> 23), -MAX_SHIFT), MAX_SHIFT)) if own > 0 else int32(0)
        # Not finite, or so large or small that its scale would leave the range: 0 says that no fp16 stands for it.
        fits = own == 0 or (own >> 23) - 127 + shift == TOP
        if thread == 0:
            factors[channel] = power(-shift) if fits else float32(0)
        scale = power(shift)
        pairs = int32((in_channels + 15) // 16 * 8)
        for e in range(thread, pairs * TAPS, THREADS):
            pair, tap = int32(e // TAPS), int32(e % TAPS)
            a, b = float32(0), float32(0)
            if 2 * pair < in_channels:
                a = memory.load(weight, (2 * pair * out_channels + channel) * TAPS + tap)
                b = memory.load(weight, ((2 * pair + 1) * out_channels + channel) * TAPS + tap)
            to = ((tap * (pairs // 4) + pair // 4) * out_channels + channel) * 4 + pair % 4
            packed[to], packed[pairs * TAPS * out_channels + to] = maths.split_half2(a * scale, b * scale)

    f, i, word = types.float32, types.int32, types.int64
    arrays = map(types.CPointer, (f, i, f, word))
    return Kernel(split, types.void(*arrays, i, i, types.UniTuple(word, WORDS)), THREADS, 1, config=())


def prepare(in_channels, out_channels, device):
    """The launch of (weight [in_channels, out_channels, 3, 3], *``empty``) and (the words of x's map,); in_channels is even."""
    return build().prepare(device, out_channels, in_channels, out_channels)
