"""What becomes of a unit's sums: their scales undone, bias, epilogue, stores.

A consumer's thread has sums of two pixels and both column parities, 16 bytes of a row of outputs, for every fourth pair of
channels. It stores those of another lane, so that neighbours store whole lines.
"""

from collections.abc import Callable
from typing import NamedTuple

from numba import cuda, float32, int32, int64

from numba_impl.backends.hopper.exact import OPERATIONS
from numba_impl.backends.hopper.layout import ALL_LANES, Config, pixel, stored_lane
from numba_impl.cuda.device import device, unroll
from numba_impl.cuda.fragments import accumulator
from numba_impl.cuda.pipeline import element
from numba_impl.cuda.ptx import memory

accumulator_of, pixel_of, lane_stored = map(device, (accumulator, pixel, stored_lane))


class Seat(NamedTuple):
    """What a thread stores."""

    source: int  # the lane whose sums they are
    channels: int  # shared address of factor and bias of the first channel that it has sums of itself
    cell: int  # the first of two
    corner: int  # global address of its output of image 0 and row 0
    plane: int  # bytes of an output channel


class Finish(NamedTuple):
    """Device functions."""

    seat: Callable  # (shared, thread, first_cell, out, sizes) -> Seat
    store: Callable  # (sums, undo, image, row, seat, gy, out, sizes, constants)


def build(config: Config, epilogue) -> Finish:
    """With gy (): the epilogue of the sums; with (gy,): its gradient at them."""
    C_OUT, VECTOR, GRADIENT = config.out_channels, config.vector, config.operation == "pre_gradient"
    CHANNELS = config.shared.places.channels
    activate, gradient = epilogue.build_forward(OPERATIONS), epilogue.build_gradient(OPERATIONS)

    @device
    def seat(shared, thread, first_cell, out, sizes):
        _, _, out_height, out_width = sizes
        _, column = accumulator_of(thread, 0)
        lane = int32(thread % 32)
        source = int32(lane_stored(lane))
        row, stored_column = accumulator_of(thread - lane + source, 0)
        cell, plane = int32(first_cell + pixel_of(row)), int64(out_height) * out_width * 4
        corner = memory.global_address(out) + stored_column * plane + 8 * cell
        return Seat(source, element(shared, CHANNELS, column), cell, corner, plane)

    @device
    def combine(i, y, row, register, sums, factor, bias, constants):
        z = sums[2 * row + i % 2, register + i // 2 * 2] * factor + bias
        y[i] = z if GRADIENT else activate(z, constants)

    @device
    def differentiate(i, z, g, constants):
        z[i] = gradient(z[i], g[i], constants)

    combine_all, differentiate_all = unroll(4, combine), unroll(4, differentiate)

    @device
    def load_run(g, at, left):
        if VECTOR == 4:
            g[0], g[1], g[2], g[3] = memory.load_global_or_zero(at, float32, left > 0, 4)
        else:
            for i in range(4):
                g[i] = memory.load_global_or_zero(at + 4 * i, float32, left > i)

    @device
    def stream_run(y, at, left):
        if VECTOR == 4:
            memory.stream(at, float32, (y[0], y[1], y[2], y[3]), left > 0)
        elif VECTOR == 2:
            memory.stream(at, float32, (y[0], y[1]), left > 0)
            memory.stream(at + 8, float32, (y[2], y[3]), left > 2)
        else:
            for i in range(4):
                memory.stream(at + 4 * i, float32, y[i], left > i)

    @device
    def store_run(row, register, sums, factor, bias, source, at, left, from_out, constants):
        """Of one channel and row parity: four neighbours, of which the first ``left`` are inside the image."""
        y = cuda.local.array(4, float32)
        combine_all(y, row, register, sums, factor, bias, constants)
        for i in range(4):
            y[i] = cuda.shfl_sync(ALL_LANES, y[i], source)
        if GRADIENT:
            g = cuda.local.array(4, float32)
            load_run(g, at + from_out, left)
            differentiate_all(y, g, constants)
        stream_run(y, at, left)

    @device
    def store_channel(i, sums, undo, at, left, seat, from_out, constants):
        group, odd = i // 2, i % 2
        factor, bias = memory.load_shared(seat.channels + CHANNELS.step * (8 * group + odd), float32, 2)
        factor = factor * undo
        for row in range(2):
            store_run(row, 4 * group + odd, sums, factor, bias, seat.source, at[row], left[row], from_out, constants)
        step = 7 * seat.plane if odd else seat.plane
        at[0], at[1] = at[0] + step, at[1] + step

    store_channels = unroll(C_OUT // 4, store_channel)

    @device
    def store(sums, undo, image, row, seat, gy, out, sizes, constants):
        # Addresses are counted up from channel to channel, as products for every channel would fill the registers.
        at = cuda.local.array(2, int64)
        _, _, out_height, out_width = sizes
        row_bytes = int64(out_width) * 4
        left = int32(out_width - 2 * seat.cell)
        left_below = left if 2 * row + 1 < out_height else int32(0)
        at[0] = seat.corner + image * C_OUT * seat.plane + 2 * row * row_bytes
        at[1] = at[0] + row_bytes
        from_out = memory.global_address(gy[0]) - memory.global_address(out) if GRADIENT else int64(0)
        store_channels(sums, undo, at, (left, left_below), seat, from_out, constants)

    return Finish(seat, store)
