"""Transposed convolution, parity-split and tiled, with the epilogue fused; strict fp32.

A block computes some output channels of a rectangle of cells (see ``problem``). It walks the input
channels in stages: the next stage's pixels and weights are copied to one half of shared memory while the
present one's, in the other half, are multiplied. A thread keeps its sums in registers, for a few channels and
cells and every parity: a pixel or a weight, once loaded, serves many multiply-adds. At the end it activates
the sums where they are and stores them; no intermediate reaches device memory. The kernel of "pre_gradient"
is the same but for its end, where it stores the epilogue's gradient at the sums.
"""

from collections.abc import Callable
from typing import NamedTuple

from numba import cuda, float32, int32, int64
from numba.cuda import types

from numba_impl.backends.tiled.tile import Tile
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


class Group(NamedTuple):
    """A thread's place in its block's part."""

    channel: int
    row: int
    col: int


class Corner(NamedTuple):
    """A thread's first output, and how the others lie from there."""

    channel: int
    at: int  # its offset
    plane: int  # to the same place in the next channel
    width: int  # to the same place in the next row
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
    request: Callable  # (smem, half, array, source, offsets, thread): start the copies of a stage to a half of shared memory


@built
def build(geometry: Geometry, tile: Tile, operation, epilogue: Epilogue) -> Kernel:
    """The kernel for a geometry, a tile and an operation. Its arguments:

    - x, the weight as ``weights.packer`` gives it, the bias, for "pre_gradient" gy, the output: fp32, contiguous;
    - ``sizes``: input channels, height, width, output channels, height, width;
    - ``tiles``: of the grid, along channels, rows and columns;
    - ``bias_size``: values of the bias, 0 for none;
    - ``vectors``: whether outputs, and gy, may be accessed by four; ``whole``: whether weights may be copied so;
    - the epilogue's constants.
    """
    SUMS = tile.channels, tile.rows * geometry.rows.stride, tile.cols * geometry.cols.stride
    DEPTH, OUT_COLS = tile.depth, SUMS[2]
    part_of, group_of, corner_of = _places(geometry, tile)
    pixels, weights = _pixels(geometry, tile), _weights(geometry, tile)
    X_COPIES, W_COPIES = pixels.count, weights.count
    clear, multiply = _products(geometry, tile)
    finish = _ending(SUMS, operation, epilogue)

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
                pixels.request(smem, half, x, x_source, x_offsets, thread)
                weights.request(smem, half, weight, w_source, w_offsets, thread, whole)
                x_source, w_source = advance(x_source), advance(w_source)
            if stage > 0:
                multiply(smem, int32(1 - half), group, sums)
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
            run = cuda.local.array(OUT_COLS, float32)  # room for a row of gy
            compute(x, weight, bias, (gy, run), out, sizes, tiles, bias_size, vectors, whole, constants)

    arrays = [types.CPointer(types.float32)] * (4 if operation == "forward" else 5)
    numbers = types.UniTuple(types.int32, 6), types.UniTuple(types.int32, 3), types.int32, types.boolean, types.boolean
    signature = types.void(*arrays, *numbers, types.UniTuple(types.float32, len(epilogue.parameters)))
    config = epilogue.config(geometry, tile, operation)
    return Kernel(tiled, signature, tile.threads, tile.blocks, config, tile.shared(geometry).bytes)


def _places(geometry, tile):
    """(``part_of``, ``group_of``, ``corner_of``): where a block and a thread compute."""
    COL_GROUPS, CHANNEL_GROUPS = tile.col_groups, tile.channel_groups
    TILE_CHANNELS, TILE_ROWS, TILE_COLS = tile.tile_channels, tile.tile_rows, tile.tile_cols
    CHANNELS, ROWS, COLS, (SH, SW) = tile.channels, tile.rows, tile.cols, geometry.stride

    @device
    def part_of(block, tiles):
        channel_tiles, row_tiles, col_tiles = tiles
        channel_tile = int32(block % channel_tiles)  # neighbours share their pixels in L2
        col = int32(block // channel_tiles % col_tiles * TILE_COLS)
        row = int32(block // (channel_tiles * col_tiles) % row_tiles * TILE_ROWS)
        return Part(int64(block // (channel_tiles * col_tiles * row_tiles)), channel_tile, row, col)

    @device
    def group_of(thread):
        col, channel = int32(thread % COL_GROUPS), int32(thread // COL_GROUPS % CHANNEL_GROUPS)
        return Group(channel, int32(thread // (COL_GROUPS * CHANNEL_GROUPS)), col)

    @device
    def corner_of(part, group, sizes):
        _, _, _, channels, height, width = sizes
        channel = int32(part.channel_tile * TILE_CHANNELS + group.channel * CHANNELS)
        row, col = int32((part.row + group.row * ROWS) * SH), int32((part.col + group.col * COLS) * SW)
        at = ((part.image * channels + channel) * height + row) * width + col
        left = int32(channels - channel), int32(height - row), int32(width - col)
        return Corner(channel, at, int64(height) * width, width, *left)

    return part_of, group_of, corner_of


def _pixels(geometry, tile) -> Copies:
    """A value at a time, as rows begin anywhere; zeros outside the image and below the last input channel."""
    DEPTH, ROWS, COLS = tile.pixel_stage(geometry)
    THREADS, STAGE = tile.threads, DEPTH * ROWS * COLS
    AT, HALF = _values(tile.shared(geometry).places.pixels)
    FIRST_ROW, FIRST_COL = geometry.rows.first_shift, geometry.cols.first_shift
    COPIES = -(-STAGE // THREADS)

    @device
    def locate(i, offsets, thread, row, col, height, width):
        e = thread + i * THREADS
        r, c = row + e // COLS % ROWS, col + e % COLS
        offset = (e // (COLS * ROWS) * height + r) * width + c
        inside = 0 <= r and r < height and 0 <= c and c < width and e < STAGE and offset < OUTSIDE
        offsets[i] = int32(offset) if inside else int32(OUTSIDE)

    @device
    def request_one(i, smem, to, x, base, left, offsets, thread):
        if (i + 1) * THREADS <= STAGE or i * THREADS + thread < STAGE:
            copy.start_or_zero(smem, to + i * THREADS + thread, x, base, offsets[i], 1, offsets[i] < left)

    locate_all, request_all = unroll(COPIES, locate), unroll(COPIES, request_one)

    @device
    def begin(offsets, thread, part, sizes):
        channels, height, width, _, _, _ = sizes
        locate_all(offsets, thread, int32(part.row + FIRST_ROW), int32(part.col + FIRST_COL), height, width)
        size = int32(channels * height * width)
        return Source(part.image * channels * height * width, size, int32(DEPTH * height * width))

    @device
    def request(smem, half, x, source, offsets, thread):
        request_all(smem, int32(AT + half * HALF), x, source.base, source.left, offsets, thread)

    return Copies(COPIES, begin, request)


def _weights(geometry, tile) -> Copies:
    """Four values at a time: packed weights as they lie, others by rows of an input channel.

    Below the last input channel others become zeros, and beyond the last output channel whatever comes: no sum of it is stored.
    """
    THREADS, DEPTH, PACKED = tile.threads, tile.depth, tile.packs(geometry)
    TAPS, ROW = geometry.taps, geometry.taps * tile.tile_channels
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
            return Source(int64(part.channel_tile) * stages * STAGE, int32(0), int32(STAGE))
        row, first = int32(out_channels * TAPS), int32(part.channel_tile * ROW)
        locate_all(offsets, thread, row)
        return Source(int64(first), int32(in_channels * row - first), int32(DEPTH * row))

    @device
    def request(smem, half, weight, source, offsets, thread, whole):
        request_all(smem, int32(AT + half * HALF), weight, source.base, source.left, offsets, thread, whole)

    return Copies(COPIES, begin, request)


def _products(geometry, tile):
    """(``clear``, ``multiply``): a thread's sums begin at zero, and get the products of a stage."""
    CHANNELS, ROWS, COLS, STEPS, UNROLL = tile.channels, tile.rows, tile.cols, tile.depth // tile.unroll, tile.unroll
    (SH, SW), (PH, PW), (_, KW), TAPS = geometry.stride, geometry.padding, geometry.kernel_size, geometry.taps
    FIRST_ROW, FIRST_COL = geometry.rows.first_shift, geometry.cols.first_shift
    (X_AT, X_HALF), (W_AT, W_HALF) = map(_values, tile.shared(geometry).places)
    _, X_ROWS, X_COLS = tile.pixel_stage(geometry)
    W_ROW = TAPS * tile.tile_channels
    TAP_STEP, CHANNEL_STEP = (tile.tile_channels, 1) if tile.packs(geometry) else (1, TAPS)  # from a weight to the next
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


def _ending(shape, operation, epilogue):
    """``finish``: a thread's sums get their bias, become the outputs or the gradients at the sums, and are stored."""
    CHANNELS, ROWS, COLS = shape

    if operation == "forward":
        activate = epilogue.build_forward(OPERATIONS)

        @device
        def finish_row(k, row, sums, inputs, at, left, vectors, constants):
            for m in range(COLS):
                sums[k, row, m] = activate(sums[k, row, m], constants)
    else:
        gradient = epilogue.build_gradient(OPERATIONS)

        @device
        def finish_row(k, row, sums, inputs, at, left, vectors, constants):
            gy, run = inputs
            if vectors:
                for m in range(0, COLS, 4):
                    if m < left:
                        run[m], run[m + 1], run[m + 2], run[m + 3] = memory.load(gy, at + m, 4)
            else:
                for m in range(COLS):
                    if m < left:
                        run[m] = memory.load(gy, at + m)
            for m in range(COLS):
                sums[k, row, m] = gradient(sums[k, row, m], run[m], constants)

    @device
    def store_row(k, row, sums, out, at, left, vectors):
        if vectors:
            for m in range(0, COLS, 4):
                if m < left:
                    memory.store(out, at + m, (sums[k, row, m], sums[k, row, m + 1], sums[k, row, m + 2], sums[k, row, m + 3]))
        else:
            for m in range(COLS):
                if m < left:
                    out[at + m] = sums[k, row, m]

    @device
    def end_row(i, sums, biases, inputs, out, corner, vectors, constants):
        k, row = i // ROWS, i % ROWS
        if k < corner.channels_left and row < corner.rows_left:
            at = corner.at + k * corner.plane + row * corner.width
            for m in range(COLS):
                sums[k, row, m] += biases[k]
            finish_row(k, row, sums, inputs, at, corner.cols_left, vectors, constants)
            store_row(k, row, sums, out, at, corner.cols_left, vectors)

    end_rows = unroll(CHANNELS * ROWS, end_row)

    @device
    def finish(sums, bias, bias_size, inputs, out, corner, vectors, constants):
        biases = cuda.local.array(CHANNELS, float32)
        for k in range(CHANNELS):
            biases[k] = bias[corner.channel + k] if corner.channel + k < bias_size else float32(0)
        end_rows(sums, biases, inputs, out, corner, vectors, constants)

    return finish


def _values(place: Place):
    """(where a field of two halves begins, from one to the other), in values."""
    return place.at // 4, place.step // 4
