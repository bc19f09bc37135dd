"""A unit of the Hopper kernel in plain fp32, for values that no scale fits into fp16: right for all, and slower.

A thread has one cell and eight output channels at a time, every parity: 32 sums, for which it loads four pixels and
72 weights an input channel.
"""

from numba import cuda, float32, int32, int64

from numba_impl import epilogue
from numba_impl.backends.hopper.scaling import INFINITE
from numba_impl.cuda import ptx
from numba_impl.cuda.device import device, unroll

BLOCK = 8  # output channels at a time

activate = epilogue.build(device, ptx.exp2, ptx.reciprocal, ptx.minimum, ptx.maximum)
gradient = epilogue.build_backward(device, ptx.exp2, ptx.reciprocal)


def build(in_channels, out_channels, strip, threads, tf32, backward=False):
    """A device function that computes every output of ``strip`` cells of one row, by one warpgroup of ``threads``.

    Its arguments: thread, x, weight [in_channels, out_channels, 9], bias, gy, out, the unit's image, row and first cell,
    sizes (height, width, out_height, out_width), constants. With ``tf32`` operands are rounded to 10 bits first.
    With ``backward`` it gives the gradient at the pre-activation, from gy at the output, which is not read otherwise.
    """
    C_IN, C_OUT, STRIP = in_channels, out_channels, strip
    GROUPS = threads // strip

    @device
    def rounded(value):
        if not tf32:
            return value
        bits = ptx.bits(value)
        finite = bits & INFINITE != INFINITE
        return ptx.from_bits(int32((bits + 0xFFF + (bits >> 13 & 1)) & ~0x1FFF)) if finite else value

    @device
    def clear(k, sums):
        for parity in range(4):
            sums[k, parity] = float32(0)

    @device
    def load_pixel(i, pixels, inside, x, at, width, rows_left, cols_left):
        dh, dw = i // 2, i % 2
        inside[i] = dh < rows_left and dw < cols_left
        pixels[i] = rounded(ptx.load(x, at + dh * width + dw)) if inside[i] else float32(0)

    @device
    def multiply(k, sums, pixels, inside, weight, at):
        """Tap (kh, kw) feeds parity (kh != 1, kw != 1) from the pixel at shift (kh == 0, kw == 0)."""
        for tap in range(9):
            parity = (2 if tap // 3 != 1 else 0) + (1 if tap % 3 != 1 else 0)
            shift = (2 if tap // 3 == 0 else 0) + (1 if tap % 3 == 0 else 0)
            w = rounded(ptx.load(weight, at + 9 * k + tap))
            sums[k, parity] += (w if inside[shift] else float32(0)) * pixels[shift]  # an infinite weight times no pixel is 0

    @device
    def store(k, sums, bias, gy, out, channel, at, plane, out_width, rows_left, cols_left, constants):
        for parity in range(4):
            a, b = parity // 2, parity % 2
            if a < rows_left and b < cols_left:
                to, z = at + k * plane + a * out_width + b, sums[k, parity] + bias[channel + k]
                out[to] = gradient(z, gy[to], *constants) if backward else activate(z, *constants)

    clear_all, load_pixels = unroll(BLOCK, clear), unroll(4, load_pixel)
    multiply_all, store_all = unroll(BLOCK, multiply), unroll(BLOCK, store)

    @device
    def compute_plainly(thread, x, weight, bias, gy, out, image, row, first_cell, sizes, constants):
        sums, pixels = cuda.local.array((BLOCK, 4), float32), cuda.local.array(4, float32)
        inside = cuda.local.array(4, int32)
        height, width, out_height, out_width = sizes
        cell = int32(first_cell + thread % STRIP)
        plane = int64(out_height) * out_width
        for channel in range(thread // STRIP * BLOCK, C_OUT, GROUPS * BLOCK):
            clear_all(sums)
            for c in range(C_IN):
                at = ((int64(image) * C_IN + c) * height + row) * width + cell
                load_pixels(pixels, inside, x, at, width, height - row, width - cell)
                multiply_all(sums, pixels, inside, weight, (c * C_OUT + channel) * 9)
            at = (int64(image) * C_OUT + channel) * plane + 2 * row * int64(out_width) + 2 * cell
            rows_left, cols_left = int32(out_height - 2 * row), int32(out_width - 2 * cell)
            store_all(sums, bias, gy, out, channel, at, plane, out_width, rows_left, cols_left, constants)

    return compute_plainly
