"""How a block copies the stages of its pixels and weights to shared memory, from either format and any dtype."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from numba import int32, int64

from numba_impl.cuda import values
from numba_impl.cuda.device import device, unroll
from numba_impl.cuda.ptx import copy, memory
from numba_impl.cuda.shared import Place

OUTSIDE = 0x7FFFFFFF  # offset of a pixel outside the image: not below any image's size


class Source(NamedTuple):
    """Where the next stage lies in device memory."""

    base: int  # its offset
    left: int  # values from there to the end of what may be read
    step: int  # values to the stage after it


class Copies(NamedTuple):
    """How the threads of a block copy the stages of one array to shared memory."""

    count: int  # of a thread, a stage
    begin: Callable  # (offsets, thread, part, sizes) -> Source of the first stage; offsets: where in a stage each copy begins
    request: Callable  # (smem, half, array, source, offsets, ..., thread): start the copies of a stage to a half of shared memory
    settle: Callable | None = None  # (smem, half, staged, thread): put there what waits in registers


def pixel_copies(geometry, tile, form) -> Copies:
    """A value at a time, as rows begin anywhere; zeros outside the image and below the last input channel."""
    DEPTH, ROWS, COLS = tile.pixel_stage(geometry)
    THREADS, STAGE = tile.threads, DEPTH * ROWS * COLS
    AT, HALF = in_values(tile.shared(geometry).places.pixels)
    part, SH, PH = tile.part(geometry), geometry.rows.stride, geometry.rows.padding
    FIRST_ROW, FIRST_COL, SPLIT = part.rows.first_shift, part.cols.first_shift, tile.row_parity
    COPIES = -(-STAGE // THREADS)
    order = (_in_nchw if form.x_format == "nchw" else _in_nhwc)(DEPTH, ROWS, COLS, THREADS)
    locate_value, is_live, target, begin_at = order
    ELEMENT, widen = values.of(form.x).type, values.of(form.x).widen
    rounds = values.of(torch.float32 if form.x == form.out else form.out).round

    @device
    def locate(i, offsets, thread, row, col, channels, height, width):
        r, c, offset = locate_value(i, thread, row, col, channels, height, width)
        inside = 0 <= r and r < height and 0 <= c and c < width and i * THREADS + thread < STAGE and offset < OUTSIDE
        offsets[i] = int32(offset) if inside else int32(OUTSIDE)

    @device
    def copy_one(i, smem, to, x, base, left, offsets, staged, thread):
        if (i + 1) * THREADS <= STAGE or i * THREADS + thread < STAGE:
            copy.start_or_zero(smem, to + target(i, thread), x, base, offsets[i], 1, is_live(thread, offsets[i], left))

    @device
    def load_one(i, smem, to, x, base, left, offsets, staged, thread):
        staged[i] = memory.load(x, base + offsets[i]) if is_live(thread, offsets[i], left) else ELEMENT(0)

    @device
    def settle_one(i, smem, to, staged, thread):
        if (i + 1) * THREADS <= STAGE or i * THREADS + thread < STAGE:
            memory.store(smem, to + target(i, thread), rounds(widen(staged[i])))

    locate_all = unroll(COPIES, locate)
    request_all, settle_all = unroll(COPIES, load_one if form.staged else copy_one), unroll(COPIES * form.staged, settle_one)

    @device
    def begin(offsets, thread, part, sizes):
        channels, height, width, _, _, _ = sizes
        lift = int32(0)
        if SPLIT:  # the shift of the parity's first tap
            lift = int32((PH - (part.parity + PH) % SH + SH - 1) // SH)
        first_row, first_col = int32(part.row + FIRST_ROW + lift), int32(part.col + FIRST_COL)
        locate_all(offsets, thread, first_row, first_col, channels, height, width)
        return begin_at(part.image, channels, height, width)

    @device
    def request(smem, half, x, source, offsets, staged, thread):
        request_all(smem, int32(AT + half * HALF), x, source.base, source.left, offsets, staged, thread)

    @device
    def settle(smem, half, staged, thread):
        settle_all(smem, int32(AT + half * HALF), staged, thread)

    return Copies(COPIES, begin, request, settle)


def _in_nchw(depth, rows, cols, threads):
    """How a stage of [depth, rows, cols] pixels is copied from an NCHW tensor, neighbours of a row by neighbouring threads.

    (``locate_value``, ``is_live``, ``target``, ``begin_at``): for the i-th value of a thread its row and column in the image, and
    its offset from the stage's base; whether it is in the image and of a channel that there is, from its offset and from
    what is left; where in the stage it belongs; the first stage's ``Source``.
    """
    DEPTH, ROWS, COLS, THREADS = depth, rows, cols, threads

    @device
    def locate_value(i, thread, row, col, channels, height, width):
        e = thread + i * THREADS
        r, c = row + e // COLS % ROWS, col + e % COLS
        return r, c, (e // (COLS * ROWS) * height + r) * width + c

    @device
    def is_live(thread, offset, left):
        return offset < left  # of the image's values

    @device
    def target(i, thread):
        return i * THREADS + thread

    @device
    def begin_at(image, channels, height, width):
        return Source(image * channels * height * width, int32(channels * height * width), int32(DEPTH * height * width))

    return locate_value, is_live, target, begin_at


def _in_nhwc(depth, rows, cols, threads):
    """``_in_nchw`` from an NHWC tensor, neighbouring channels by neighbouring threads: a thread copies one of each stage."""
    if threads % depth:
        raise ValueError(f"threads must be a multiple of depth, got {threads} and {depth}")
    DEPTH, PLANE, COLS, PIXELS = depth, rows * cols, cols, threads // depth

    @device
    def locate_value(i, thread, row, col, channels, height, width):
        pixel = thread // DEPTH + i * PIXELS
        r, c = row + pixel // COLS, col + pixel % COLS
        return r, c, (r * width + c) * channels + thread % DEPTH

    @device
    def is_live(thread, offset, left):
        return offset != OUTSIDE and thread % DEPTH < left  # of the channels

    @device
    def target(i, thread):
        return thread % DEPTH * PLANE + thread // DEPTH + i * PIXELS

    @device
    def begin_at(image, channels, height, width):
        return Source(image * channels * height * width, int32(channels), int32(DEPTH))

    return locate_value, is_live, target, begin_at


def weight_copies(geometry, tile, form) -> Copies:
    """Four values at a time: packed weights as they lie, others by rows of an input channel.

    Below the last input channel others become zeros, and beyond the last output channel whatever comes: no sum of it is stored.
    """
    THREADS, PACKED = tile.threads, form.packed
    (DEPTH, ROW), TAPS = tile.weight_stage(geometry), geometry.taps
    STAGE = DEPTH * ROW
    AT, HALF = in_values(tile.shared(geometry).places.weights)
    COPIES = -(-STAGE // (4 * THREADS))

    @device
    def locate(i, offsets, thread, row):
        e = (i * THREADS + thread) * 4
        offsets[i] = int32(e // ROW * row + e % ROW)

    @device
    def request_one(i, smem, to, weight, base, left, offsets, thread, whole):
        if (i + 1) * THREADS * 4 <= STAGE or (i * THREADS + thread) * 4 < STAGE:
            to = to + (i * THREADS + thread) * 4
            if PACKED:
                copy.start(smem, to, weight, base + i * THREADS * 4, thread * 4, 4)
            elif whole:
                copy.start_or_zero(smem, to, weight, base, offsets[i], 4, offsets[i] < left)
            else:
                for j in range(4):
                    copy.start_or_zero(smem, to + j, weight, base, offsets[i] + j, 1, offsets[i] + j < left)

    locate_all, request_all = unroll(COPIES, locate), unroll(COPIES, request_one)

    @device
    def begin(offsets, thread, part, sizes):
        in_channels, _, _, out_channels, _, _ = sizes
        if PACKED:
            stages = int32((in_channels + DEPTH - 1) // DEPTH)
            return Source(int64(part.weights) * stages * STAGE, int32(0), int32(STAGE))
        row, first = int32(out_channels * TAPS), int32(part.channel_tile * ROW)
        locate_all(offsets, thread, row)
        return Source(int64(first), int32(in_channels * row - first), int32(DEPTH * row))

    @device
    def request(smem, half, weight, source, offsets, thread, whole):
        request_all(smem, int32(AT + half * HALF), weight, source.base, source.left, offsets, thread, whole)

    return Copies(COPIES, begin, request)


def in_values(place: Place):
    """(where a field of two halves begins, from one to the other), in values."""
    return place.at // 4, place.step // 4
