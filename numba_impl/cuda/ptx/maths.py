"""Arithmetic: of fp32, its bits and halves, and among a warp's threads."""

import numpy as np

from numba_impl.cuda.ptx.emit import instruction


@instruction("ex2.approx.ftz.f32 $0, $1;", "f", "f", memory=False)
def exp2(x):
    """ex2.approx.ftz.f32: 2^x, largest relative error 2^-22; -inf gives 0."""
    return np.exp2(np.float32(x))


@instruction("rcp.approx.ftz.f32 $0, $1;", "f", "f", memory=False)
def reciprocal(x):
    """rcp.approx.ftz.f32: 1/x, largest error 1 ulp."""
    return np.float32(1) / np.float32(x)


@instruction("max.NaN.f32 $0, $1, $2;", "ff", "f", memory=False)
def maximum(x, y):
    """max.NaN.f32 (sm_80): the larger, NaN if either is; the plain max drops NaN."""
    return np.maximum(x, y)


@instruction("min.NaN.f32 $0, $1, $2;", "ff", "f", memory=False)
def minimum(x, y):
    """min.NaN.f32 (sm_80): the smaller, NaN if either is."""
    return np.minimum(x, y)


@instruction("mov.b32 $0, $1;", "f", "r", memory=False)
def bits(x):
    """mov.b32: the bits of an fp32 as an int32; those of numbers that are not negative are ordered as they are."""
    return np.float32(x).view(np.int32)


@instruction("mov.b32 $0, $1;", "r", "f", memory=False)
def from_bits(i):
    """mov.b32: the fp32 of these bits."""
    return np.int32(i).view(np.float32)


@instruction("cvt.rn.bf16.f32 $0, $1;", "f", "h", memory=False)
def bfloat16(x):
    """cvt.rn.bf16.f32 (sm_80): rounded to bfloat16, to nearest even; its bits."""
    i = int(np.float32(x).view(np.uint32))
    rounded = 0x7FFF if np.isnan(x) else (i + 0x7FFF + (i >> 16 & 1)) >> 16
    return np.uint16(rounded).view(np.int16)


@instruction("{ .reg .b16 z; mov.b16 z, 0; mov.b32 $0, {z, $1}; }", "h", "f", memory=False)
def from_bfloat16(i):
    """mov.b32: the fp32 that a bfloat16 of these bits is."""
    return np.uint32(int(i) % 2**16 << 16).view(np.float32)


@instruction("cvt.rn.f16.f32 $0, $1;", "f", "h", memory=False)
def half(x):
    """cvt.rn.f16.f32: rounded to fp16, to nearest even; its bits."""
    return np.float32(x).astype(np.float16).view(np.int16)


@instruction("cvt.f32.f16 $0, $1;", "h", "f", memory=False)
def from_half(i):
    """cvt.f32.f16: the fp32 that an fp16 of these bits is."""
    return np.int16(i).view(np.float16).astype(np.float32)


_SPLIT = """{
.reg .b16 a, b, c, d;
.reg .f32 x, y;
cvt.rn.f16x2.f32 $0, $3, $2;
mov.b32 {a, b}, $0;
cvt.f32.f16 x, a;
cvt.f32.f16 y, b;
sub.f32 x, $2, x;
sub.f32 y, $3, y;
cvt.rn.f16x2.f32 $1, y, x;
}"""


@instruction(_SPLIT, "ff", "rr", memory=False)
def split_half2(x, y):
    """cvt.rn.f16x2.f32 (sm_80), twice: two fp32 as fp16 hi and as fp16 lo = x - hi, each a pair with x in the low half.

    hi + lo is x to 22 bits while |x| is in [2^-3, 65504]; below, to within 2^-25.
    """
    values = np.array([x, y], np.float32)
    high = values.astype(np.float16)
    low = (values - high.astype(np.float32)).astype(np.float16)
    return high.view(np.int32)[0], low.view(np.int32)[0]


@instruction("cvt.rn.f16x2.f32 $0, $2, $1;", "ff", "r", memory=False)
def half2(x, y):
    """cvt.rn.f16x2.f32 (sm_80): two fp32 rounded to fp16, x in the low half."""
    return np.array([x, y], np.float16).view(np.int32)[0]


@instruction("div.u32 $0, $1, $2;", "rr", "r", memory=False)
def divide(a, b):
    """div.u32: a // b of int32 that are not negative; Numba divides in 64 bits, ten times the instructions."""
    return a // b


@instruction("redux.sync.max.s32 $0, $1, 0xffffffff;", "r", "r")
def warp_max(value):
    """redux.sync.max.s32 (sm_80): the largest int32 of the warp's 32 threads."""


@instruction("redux.sync.min.s32 $0, $1, 0xffffffff;", "r", "r")
def warp_min(value):
    """redux.sync.min.s32 (sm_80): the smallest int32 of the warp's 32 threads."""
