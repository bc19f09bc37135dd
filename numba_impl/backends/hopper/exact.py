"""A unit of the Hopper kernel in plain fp32, for values that no scale fits into fp16: right for all, and slower.

A thread has one cell and eight output channels at a time, every parity: 32 sums, for which it loads four pixels and
72 weights an input channel.
"""

from numba import cuda, float32, int32, int64

from numba_impl.backends.hopper.schedule import PARITIES, PARITY, SHIFT, SHIFTS, TAPS
from numba_impl.cuda.device import device, unroll
from numba_impl.cuda.ptx import maths, memory
from numba_impl.epilogue import Operations

BLOCK = 8  # output channels at a time
OPERATIONS = Operations(device, maths.exp2, maths.reciprocal, maths.minimum, maths.maximum)


def build(in_channels, out_channels, strip, threads, tf32, operation, epilogue):
    """A device function that computes every output of ``strip`` cells of one row, by one warpgroup of ``threads``.

    Its arguments: thread, x, weight [in_channels, out_channels, 9], bias, gy, out, the unit's image, row and first cell,
    sizes (height, width, out_height, out_width), constants. With ``tf32`` operands are rounded to 10 bits first.
    ``operation`` "forward" takes no gradient, gy is (); "pre_gradient" gives that at the pre-activation from (gy,).
    """
    C_IN, C_OUT, STRIP, GRADIENT = in_channels, out_channels, strip, operation == "pre_gradient"
    GROUPS = threads // strip
    activate, gradient = epilogue.build_forward(OPERATIONS), epilogue.build_gradient(OPERATIONS)

    @device
    def rounded(value):
        if not tf32:
            return value
        bits = maths.bits(value)
        return maths.from_bits(int32((bits + 0xFFF + (bits >> 13 & 1)) & ~0x1FFF)) if value == value else value

    @device
    def clear(k, sums):
        for parity in range(PARITIES):
            sums[k, parity] = float32(0)

    @device
    def load_pixel(shift, pixels, inside, x, at, width, rows_left, cols_left):
        row, col = shift // 2, shift % 2
        inside[shift] = row < rows_left and col < cols_left
        pixels[shift] = rounded(memory.load(x, at + row * width + col)) if inside[shift] else float32(0)

    @device
    def multiply_tap(tap, k, sums, pixels, inside, weight, at):
        w, parity, shift = rounded(memory.load(weight, at + 9 * k + tap)), PARITY[tap], SHIFT[tap]
        sums[k, parity] += (w if inside[shift] else float32(0)) * pixels[shift]  # an infinite weight times no pixel is 0

    @device
    def multiply(k, sums, pixels, inside, weight, at):
        multiply_taps(k, sums, pixels, inside, weight, at)

    @device
    def store(k, sums, bias, gy, out, channel, at, plane, out_width, rows_left, cols_left, constants):
        for parity in range(PARITIES):
            a, b = parity // 2, parity % 2
            if a < rows_left and b < cols_left:
                to, z = at + k * plane + a * out_width + b, sums[k, parity] + bias[channel + k]
                out[to] = gradient(z, gy[0][to], constants) if GRADIENT else activate(z, constants)

    multiply_taps = unroll(TAPS, multiply_tap)
    clear_all, load_pixels = unroll(BLOCK, clear), unroll(SHIFTS, load_pixel)
    multiply_all, store_all = unroll(BLOCK, multiply), unroll(BLOCK, store)

    @device
    def compute_exactly(thread, x, weight, bias, gy, out, image, row, first_cell, sizes, constants):
        sums, pixels = cuda.local.array((BLOCK, PARITIES), float32), cuda.local.array(SHIFTS, float32)
        inside = cuda.local.array(SHIFTS, int32)
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

    return compute_exactly
