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

from typing import NamedTuple

from numba import cuda, float32, int32, int64
from numba.cuda import types

from numba_impl.backends.tiled.copies import Source, in_values, pixel_copies, weight_copies
from numba_impl.backends.tiled.form import Form
from numba_impl.backends.tiled.tile import Tile
from numba_impl.cuda import values
from numba_impl.cuda.device import device, unroll
from numba_impl.cuda.kernel import Kernel, built
from numba_impl.cuda.ptx import copy, maths, memory
from numba_impl.epilogue import Epilogue, Operations
from numba_impl.problem import Geometry

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
    pixels, weights = pixel_copies(geometry, tile, form), weight_copies(geometry, tile, form)
    X_COPIES, W_COPIES = pixels.count, weights.count
    clear, multiply = _products(geometry, tile, form)
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


def _products(geometry, tile, form):
    """(``clear``, ``multiply``): a thread's sums begin at zero, and get the products of a stage."""
    (X_AT, X_HALF), (W_AT, W_HALF) = map(in_values, tile.shared(geometry).places)
    _, X_ROWS, X_COLS = tile.pixel_stage(geometry)
    geometry = tile.part(geometry)
    CHANNELS, ROWS, COLS, STEPS, UNROLL = tile.channels, tile.rows, tile.cols, tile.depth // tile.unroll, tile.unroll
    (SH, SW), (PH, PW), (_, KW), TAPS = geometry.stride, geometry.padding, geometry.kernel_size, geometry.taps
    FIRST_ROW, FIRST_COL = geometry.rows.first_shift, geometry.cols.first_shift
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
