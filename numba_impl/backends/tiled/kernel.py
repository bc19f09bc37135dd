"""Transposed convolution, parity-split and tiled, with the epilogue fused; sums in strict fp32.

A block computes some output channels of a rectangle of cells (see ``problem``). It walks the input
channels in stages: the next stage's pixels and weights are copied to one half of shared memory while the
present one's, in the other half, are multiplied. A thread keeps its sums in registers, for a few channels and
cells and every parity: a pixel or a weight, once loaded, serves many multiply-adds. At the end it activates
the sums where they are and stores them; no intermediate reaches device memory. The kernel of "pre_gradient"
is the same but for its end, where it stores the epilogue's gradient at the sums.

Shared memory holds fp32 whatever the operands are. Pixels that are not copied as they are wait in registers while
a stage is multiplied, and are widened on their way to shared memory.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from numba import cuda, float32, int32, int64
from numba.cuda import types

from numba_impl.backends.tiled.form import Form
from numba_impl.backends.tiled.tile import Tile
from numba_impl.cuda import values
from numba_impl.cuda.device import device, unroll
from numba_impl.cuda.kernel import Kernel, built
from numba_impl.cuda.ptx import copy, maths, memory
from numba_impl.cuda.shared import Place
from numba_impl.epilogue import Epilogue, Operations
from numba_impl.problem import Geometry

OUTSIDE = 0x7FFFFFFF  # offset of a pixel outside the image: not below any image's size
OPERATIONS = Operations(device, maths.exp2, maths.reciprocal, maths.minimum, maths.maximum)


class Part(NamedTuple):
    """A block's part of the output: an image, a tile of channels, and the first row and column of its cells."""

    image: int
    channel_tile: int
    row: int
    col: int
    parity: int  # of the rows, where a block has those of one
    weights: int  # its tile of packed weights


class Group(NamedTuple):
    """A thread's place in its block's part."""

    channel: int
    row: int
    col: int


class Corner(NamedTuple):
    """A thread's first output, and how the others lie from there."""

    channel: int
    at: int  # its offset
    channel_step: int  # to the same place in the next channel
    row_step: int
    col_step: int
    channels_left: int  # from there to the output's end
    rows_left: int
    cols_left: int


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


@built
def build(geometry: Geometry, tile: Tile, operation, epilogue: Epilogue, form: Form) -> Kernel:
    """The kernel for a geometry, a tile and an operation. Its arguments:

    - x, the weight as the form says, the bias, for "pre_gradient" gy, the output, contiguous in their formats;
    - ``sizes``: input channels, height, width, output channels, height, width;
    - ``tiles``: of the grid, along channels, rows and columns;
    - ``bias_size``: values of the bias, 0 for none;
    - ``vectors``: whether outputs, and gy, may be accessed by four; ``whole``: whether weights may be copied so;
    - the epilogue's constants.
    """
    part = tile.part(geometry)
    SUMS = tile.channels, tile.rows * part.rows.stride, tile.cols * part.cols.stride
    X, BIAS, OUT = (values.of(dtype).type for dtype in (form.x, form.bias, form.out))
    DEPTH, LENGTH = tile.depth, SUMS[2] if form.out_format == "nchw" else SUMS[0]
    part_of, group_of, corner_of = _places(geometry, tile, form)
    pixels, weights = _pixels(geometry, tile, form), _weights(geometry, tile, form)
    X_COPIES, W_COPIES = pixels.count, weights.count
    clear, multiply = _products(part, tile, tile.shared(geometry).places, tile.pixel_stage(geometry), form)
    finish = _ending(SUMS, operation, epilogue, form)

    @device
    def advance(source):
        return Source(source.base + source.step, int32(source.left - source.step), source.step)

    @device
    def exchange():
        """All threads' copies have arrived, and none reads what it has multiplied: the halves of shared memory change places."""
        copy.wait()
        cuda.syncthreads()

    @device
    def compute(x, weight, bias, inputs, out, sizes, tiles, bias_size, vectors, whole, constants):
        smem = cuda.shared.array(0, float32)  # tile.shared(geometry)
        x_offsets, w_offsets = cuda.local.array(X_COPIES, int32), cuda.local.array(W_COPIES, int32)
        staged = cuda.local.array(X_COPIES, X)
        sums = cuda.local.array(SUMS, float32)
        thread = int32(cuda.threadIdx.x)
        group, part = group_of(thread), part_of(int32(cuda.blockIdx.x), tiles)
        x_source, w_source = pixels.begin(x_offsets, thread, part, sizes), weights.begin(w_offsets, thread, part, sizes)
        clear(sums)

        # In each round a stage is on its way while the one before it is multiplied: one round more than there are stages.
        stages, stage = int32((sizes[0] + DEPTH - 1) // DEPTH), int32(0)
        while True:  # no test before the first round: the compiler would set the sums to zero on either side of it
            half = int32(stage & 1)
            if stage < stages:
                pixels.request(smem, half, x, x_source, x_offsets, staged, thread)
                weights.request(smem, half, weight, w_source, w_offsets, thread, whole)
                x_source, w_source = advance(x_source), advance(w_source)
            if stage > 0:
                multiply(smem, int32(1 - half), group, sums)
            if stage < stages:
                pixels.settle(smem, half, staged, thread)
            exchange()
            if stage == stages:
                break
            stage = int32(stage + 1)

        finish(sums, bias, bias_size, inputs, out, corner_of(part, group, sizes), vectors, constants)

    if operation == "forward":

        def tiled(x, weight, bias, out, sizes, tiles, bias_size, vectors, whole, constants):
            compute(x, weight, bias, (), out, sizes, tiles, bias_size, vectors, whole, constants)
    else:

        def tiled(x, weight, bias, gy, out, sizes, tiles, bias_size, vectors, whole, constants):
            run = cuda.local.array(LENGTH, float32)  # room for neighbours of gy
            compute(x, weight, bias, (gy, run), out, sizes, tiles, bias_size, vectors, whole, constants)

    arrays = [types.CPointer(kind) for kind in (X, types.float32, BIAS, *[OUT] * (1 if operation == "forward" else 2))]
    numbers = types.UniTuple(types.int32, 6), types.UniTuple(types.int32, 3), types.int32, types.boolean, types.boolean
    signature = types.void(*arrays, *numbers, types.UniTuple(types.float32, len(epilogue.parameters)))
    config = epilogue.config(geometry, tile, operation, form)
    return Kernel(tiled, signature, tile.threads, tile.blocks, config, tile.shared(geometry).bytes)


def _places(geometry, tile, form):
    """(``part_of``, ``group_of``, ``corner_of``): where a block and a thread compute."""
    COL_GROUPS, CHANNEL_GROUPS, PARITIES = tile.col_groups, tile.channel_groups, tile.row_parities(geometry)
    TILE_CHANNELS, TILE_ROWS, TILE_COLS = tile.tile_channels, tile.tile_rows, tile.tile_cols
    CHANNELS, ROWS, COLS, (SH, SW) = tile.channels, tile.rows, tile.cols, geometry.stride

    @device
    def part_of(block, tiles):
        channel_tiles, row_tiles, col_tiles = tiles
        channel_tile = int32(block % channel_tiles)  # neighbours share their pixels in L2
        parity = int32(block // channel_tiles % PARITIES)  # and lines of the output
        block = int32(block // (channel_tiles * PARITIES))
        col = int32(block % col_tiles * TILE_COLS)
        row = int32(block // col_tiles % row_tiles * TILE_ROWS)
        image = int64(block // (col_tiles * row_tiles))
        return Part(image, channel_tile, row, col, parity, int32(parity * channel_tiles + channel_tile))

    @device
    def group_of(thread):
        col, channel = int32(thread % COL_GROUPS), int32(thread // COL_GROUPS % CHANNEL_GROUPS)
        return Group(channel, int32(thread // (COL_GROUPS * CHANNEL_GROUPS)), col)

    @device
    def place(part, group, sizes):
        """(channel, row, column) of the first output, and how many there are from it to the ends."""
        _, _, _, channels, height, width = sizes
        channel = int32(part.channel_tile * TILE_CHANNELS + group.channel * CHANNELS)
        row = int32((part.row + group.row * ROWS) * SH + part.parity)
        col = int32((part.col + group.col * COLS) * SW)
        rows_left = int32((height - row + PARITIES - 1) // PARITIES) if PARITIES > 1 else int32(height - row)
        return channel, row, col, int32(channels - channel), rows_left, int32(width - col)

    @device
    def corner_in_nchw(part, group, sizes):
        channels, height, width = sizes[3], sizes[4], sizes[5]
        channel, row, col, channels_left, rows_left, cols_left = place(part, group, sizes)
        at = ((part.image * channels + channel) * height + row) * width + col
        steps = int64(height) * width, int32(width * PARITIES), int32(1)
        return Corner(channel, at, *steps, channels_left, rows_left, cols_left)

    @device
    def corner_in_nhwc(part, group, sizes):
        channels, height, width = sizes[3], sizes[4], sizes[5]
        channel, row, col, channels_left, rows_left, cols_left = place(part, group, sizes)
        at = ((part.image * height + row) * width + col) * channels + channel
        steps = int32(1), int64(width * PARITIES) * channels, int32(channels)
        return Corner(channel, at, *steps, channels_left, rows_left, cols_left)

    return part_of, group_of, corner_in_nchw if form.out_format == "nchw" else corner_in_nhwc


def _pixels(geometry, tile, form) -> Copies:
    """A value at a time, as rows begin anywhere; zeros outside the image and below the last input channel."""
    DEPTH, ROWS, COLS = tile.pixel_stage(geometry)
    THREADS, STAGE = tile.threads, DEPTH * ROWS * COLS
    AT, HALF = _values(tile.shared(geometry).places.pixels)
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


def _weights(geometry, tile, form) -> Copies:
    """Four values at a time: packed weights as they lie, others by rows of an input channel.

    Below the last input channel others become zeros, and beyond the last output channel whatever comes: no sum of it is stored.
    """
    THREADS, PACKED = tile.threads, form.packed
    (DEPTH, ROW), TAPS = tile.weight_stage(geometry), geometry.taps
    STAGE = DEPTH * ROW
    AT, HALF = _values(tile.shared(geometry).places.weights)
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


def _products(geometry, tile, places, pixel_stage, form):
    """(``clear``, ``multiply``): a thread's sums begin at zero, and get the products of a stage. ``geometry``: of a block."""
    CHANNELS, ROWS, COLS, STEPS, UNROLL = tile.channels, tile.rows, tile.cols, tile.depth // tile.unroll, tile.unroll
    (SH, SW), (PH, PW), (_, KW), TAPS = geometry.stride, geometry.padding, geometry.kernel_size, geometry.taps
    FIRST_ROW, FIRST_COL = geometry.rows.first_shift, geometry.cols.first_shift
    (X_AT, X_HALF), (W_AT, W_HALF) = map(_values, places)
    _, X_ROWS, X_COLS = pixel_stage
    W_ROW = TAPS * tile.tile_channels
    TAP_STEP, CHANNEL_STEP = (tile.tile_channels, 1) if form.packed else (1, TAPS)  # from a weight to the next
    REG_ROWS, REG_COLS = ROWS + geometry.rows.reach, COLS + geometry.cols.reach
    X_VECTORS = REG_COLS // 4 if COLS % 4 == 0 else 0
    W_VECTORS = CHANNELS // 4 if CHANNELS % 4 == 0 else 0

    @device
    def clear(k, sums):
        for row in range(ROWS * SH):
            for col in range(COLS * SW):
                sums[k, row, col] = float32(0)

    @device
    def load_row(r, smem, at, pixels):
        for v in range(X_VECTORS):
            four = memory.load(smem, at + r * X_COLS + 4 * v, 4)
            for c in range(4):
                pixels[r, 4 * v + c] = four[c]
        for c in range(4 * X_VECTORS, REG_COLS):
            pixels[r, c] = memory.load(smem, at + r * X_COLS + c)

    @device
    def multiply_tap(tap, smem, at, pixels, weights, sums):
        for v in range(W_VECTORS):
            four = memory.load(smem, at + tap * TAP_STEP + 4 * v, 4)
            for k in range(4):
                weights[4 * v + k] = four[k]
        for k in range(4 * W_VECTORS, CHANNELS):
            weights[k] = memory.load(smem, at + tap * TAP_STEP + k * CHANNEL_STEP)
        kh, kw = tap // KW - PH, tap % KW - PW
        a, b = kh % SH, kw % SW  # the parity
        down, right = -(kh // SH) - FIRST_ROW, -(kw // SW) - FIRST_COL
        for r in range(ROWS):
            for k in range(CHANNELS):
                for c in range(COLS):
                    sums[k, r * SH + a, c * SW + b] += weights[k] * pixels[r + down, c + right]

    load_rows, multiply_taps = unroll(REG_ROWS, load_row), unroll(TAPS, multiply_tap)

    @device
    def multiply_channel(i, smem, x_at, w_at, pixels, weights, sums):
        load_rows(smem, x_at + i * X_ROWS * X_COLS, pixels)
        multiply_taps(smem, w_at + i * W_ROW, pixels, weights, sums)

    multiply_channels = unroll(UNROLL, multiply_channel)

    @device
    def multiply(smem, half, group, sums):
        pixels, weights = cuda.local.array((REG_ROWS, REG_COLS), float32), cuda.local.array(CHANNELS, float32)
        x_at = int32(X_AT + half * X_HALF + group.row * ROWS * X_COLS + group.col * COLS)
        w_at = int32(W_AT + half * W_HALF + group.channel * CHANNELS * CHANNEL_STEP)
        for _ in range(int32(STEPS)):
            multiply_channels(smem, x_at, w_at, pixels, weights, sums)
            x_at, w_at = int32(x_at + UNROLL * X_ROWS * X_COLS), int32(w_at + UNROLL * W_ROW)

    return unroll(CHANNELS, clear), multiply


def _ending(shape, operation, epilogue, form):
    """``finish``: a thread's sums get their bias, become the outputs or the gradients at the sums, and are stored.

    In runs of neighbours in memory: columns of a row in NCHW, channels of a pixel in NHWC.
    """
    CHANNELS, ROWS, COLS = shape
    BY_ROWS = form.out_format == "nchw"
    RUNS, LENGTH = (CHANNELS * ROWS, COLS) if BY_ROWS else (ROWS * COLS, CHANNELS)
    widen_bias, round_bias = values.of(form.bias).widen, values.of(form.out).round
    widen, narrow = values.of(form.out).widen, values.of(form.out).narrow

    @device
    def place(i, m):
        """(channel, row, column) of a thread's sum: the m-th of the i-th run."""
        if BY_ROWS:
            return i // ROWS, i % ROWS, m
        return m, i // COLS, i % COLS

    if operation == "forward":
        activate = epilogue.build_forward(OPERATIONS)

        @device
        def finish_run(i, sums, inputs, at, left, vectors, constants):
            for m in range(LENGTH):
                sums[place(i, m)] = activate(sums[place(i, m)], constants)
    else:
        gradient = epilogue.build_gradient(OPERATIONS)

        @device
        def finish_run(i, sums, inputs, at, left, vectors, constants):
            gy, run = inputs
            if vectors:
                for m in range(0, LENGTH, 4):
                    if m < left:
                        a, b, c, d = memory.load(gy, at + m, 4)
                        run[m], run[m + 1], run[m + 2], run[m + 3] = widen(a), widen(b), widen(c), widen(d)
            else:
                for m in range(LENGTH):
                    if m < left:
                        run[m] = widen(memory.load(gy, at + m))
            for m in range(LENGTH):
                sums[place(i, m)] = gradient(sums[place(i, m)], run[m], constants)

    @device
    def store_run(i, sums, out, at, left, vectors):
        if vectors:
            for m in range(0, LENGTH, 4):
                if m < left:
                    a, b, c, d = sums[place(i, m)], sums[place(i, m + 1)], sums[place(i, m + 2)], sums[place(i, m + 3)]
                    memory.store(out, at + m, (narrow(a), narrow(b), narrow(c), narrow(d)))
        else:
            for m in range(LENGTH):
                if m < left:
                    out[at + m] = narrow(sums[place(i, m)])

    @device
    def end_run(i, sums, biases, inputs, out, corner, vectors, constants):
        k, row, col = place(i, 0)
        if k < corner.channels_left and row < corner.rows_left and col < corner.cols_left:
            at = corner.at + k * corner.channel_step + row * corner.row_step + col * corner.col_step
            left = corner.cols_left if BY_ROWS else corner.channels_left
            for m in range(LENGTH):
                sums[place(i, m)] += biases[place(i, m)[0]]
            finish_run(i, sums, inputs, at, left, vectors, constants)
            store_run(i, sums, out, at, left, vectors)

    end_runs = unroll(RUNS, end_run)

    @device
    def finish(sums, bias, bias_size, inputs, out, corner, vectors, constants):
        biases = cuda.local.array(CHANNELS, float32)
        for k in range(CHANNELS):
            biases[k] = float32(0)
            if corner.channel + k < bias_size:
                biases[k] = round_bias(widen_bias(bias[corner.channel + k]))
        end_runs(sums, biases, inputs, out, corner, vectors, constants)

    return finish


def _values(place: Place):
    """(where a field of two halves begins, from one to the other), in values."""
    return place.at // 4, place.step // 4
