"""Weights for the Hopper kernel: scaled, split into fp16 hi + lo, and laid out as its shared memory wants them.

It runs before each call of the layer, on the same stream, so that no change of the weights can be
missed, whoever makes it (an optimiser, ``weight.data``, a replayed graph), and nothing waits. A block
has one output channel, which has a scale of its own: the largest |w| becomes 2^14 ... 2^15.
"""

import functools

import torch
from numba import cuda, float32, int32
from numba.cuda import types

from numba_impl.kernels import ptx
from numba_impl.launch import Kernel, contiguous
from numba_impl.scaling import MAX_SHIFT

THREADS = 128
TAPS = 9
TOP = 14  # exponent that the largest |w| of a channel is given


def shapes(in_channels, out_channels):
    """Of ``packed``, [hi and lo, taps, padded in_channels / 8, out_channels, 4] pairs of fp16 as int32, and of ``factors``."""
    return {"packed": (2, TAPS, -(-in_channels // 16) * 2, out_channels, 4), "factors": (out_channels,)}


def outputs(weight):
    """Empty (packed, factors) for a weight tensor, on its device."""
    packed, factors = shapes(*weight.shape[:2]).values()
    return torch.empty(packed, dtype=torch.int32, device=weight.device), torch.empty(factors, device=weight.device)


@functools.lru_cache
def build() -> Kernel:
    def split(weight, packed, factors, in_channels, out_channels):
        # weight [in_channels, out_channels, 9] fp32; packed [2 (hi, lo), 9, padded / 8, out_channels, 4] pairs of fp16
        largest = cuda.shared.array(THREADS, int32)
        thread, channel = int32(cuda.threadIdx.x), int32(cuda.blockIdx.x)
        size = int32(in_channels * TAPS)
        own = int32(0)
        for e in range(thread, size, THREADS):
            value = ptx.load(weight, (e // TAPS * out_channels + channel) * TAPS + e % TAPS)
            own = max(own, ptx.bits(value) & 0x7FFFFFFF)
        largest[thread] = own
        cuda.syncthreads()
        for other in range(THREADS):
            own = max(own, largest[other])
        shift = int32(min(max(TOP + 127 - (own >> 23), -MAX_SHIFT), MAX_SHIFT)) if own > 0 else int32(0)
        # Not finite, or so large or small that its scale would leave the range: 0 says that no fp16 stands for it.
        fits = own == 0 or (own >> 23) - 127 + shift == TOP
        if thread == 0:
            factors[channel] = ptx.from_bits(int32((127 - shift) << 23)) if fits else float32(0)
        scale = ptx.from_bits(int32((127 + shift) << 23))
        pairs = int32((in_channels + 15) // 16 * 8)
        for e in range(thread, pairs * TAPS, THREADS):
            pair, tap = int32(e // TAPS), int32(e % TAPS)
            a, b = float32(0), float32(0)
            if 2 * pair < in_channels:
                a = ptx.load(weight, (2 * pair * out_channels + channel) * TAPS + tap)
                b = ptx.load(weight, ((2 * pair + 1) * out_channels + channel) * TAPS + tap)
            to = ((tap * (pairs // 4) + pair // 4) * out_channels + channel) * 4 + pair % 4
            packed[to], packed[pairs * TAPS * out_channels + to] = ptx.split_half2(a * scale, b * scale)

    f, i = types.float32, types.int32
    signature = types.void(types.CPointer(f), types.CPointer(i), types.CPointer(f), i, i)
    return Kernel(split, signature, THREADS, 1)


def launch(weight, packed, factors):
    """Fill ``packed`` (int32, ``shapes``) and ``factors`` from ``weight`` [in_channels, out_channels, 3, 3], fp32.

    in_channels must be even; all are contiguous tensors of one device.
    """
    weight = contiguous("weight", weight)
    prepare(*weight.shape[:2], weight.device)((weight, packed, factors))


def prepare(in_channels, out_channels, device):
    """The launch for a size."""
    return build().prepare(device, out_channels, in_channels, out_channels)
