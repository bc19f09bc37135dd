"""Transposed convolution, parity-split and tiled, with the epilogue fused; strict fp32.

A block computes some output channels of a rectangle of cells (see ``problem``). It walks the input
channels in stages: the next stage's pixels and weights are copied to shared memory while the present
one is multiplied. A thread keeps its sums in registers, for a few channels and cells and every
parity: a pixel or a weight, once loaded, serves many multiply-adds. At the end it activates the sums
where they are and stores them; no intermediate reaches device memory. The backward's kernel is the
same but for its end, where it stores the epilogue's gradient at the sums.
"""

import functools
from dataclasses import dataclass

import torch
from numba import cuda, float32, int32, int64
from numba.cuda import types

from numba_impl import epilogue
from numba_impl.backends.tiled import weights as packing
from numba_impl.cuda import ptx
from numba_impl.cuda.device import device, unroll
from numba_impl.cuda.kernel import Kernel, contiguous
from numba_impl.problem import Geometry

OUTSIDE = 0x7FFFFFFF  # offset of a pixel outside the image: not below any image's size

activate = epilogue.build(device, ptx.exp2, ptx.reciprocal, ptx.minimum, ptx.maximum)
gradient = epilogue.build_backward(device, ptx.exp2, ptx.reciprocal)


@dataclass(frozen=True)
class Tile:
    """What a thread and a block compute.

    A thread: ``channels`` output channels of ``rows`` x ``cols`` cells, every parity. A block:
    ``channel_groups`` x ``row_groups`` x ``col_groups`` threads. A stage: ``depth`` input channels,
    multiplied ``unroll`` at a time in straight-line code. A multiprocessor shall hold ``blocks``.
    """

    channels: int
    rows: int
    cols: int
    channel_groups: int
    row_groups: int
    col_groups: int
    depth: int = 8
    blocks: int = 2
    unroll: int = 1

    def __post_init__(self):
        if self.depth % self.unroll:
            raise ValueError(f"depth must be a multiple of unroll, got {self.depth} and {self.unroll}")
        if self.tile_channels % 4:
            raise ValueError(f"channels * channel_groups must be a multiple of 4, got {self.tile_channels}")

    @property
    def threads(self):
        return self.channel_groups * self.row_groups * self.col_groups

    @property
    def tile_channels(self):
        return self.channels * self.channel_groups

    def packs(self, geometry):
        """Whether the kernel takes packed weights (``packer``): where vectors of a thread's channels are to be loaded, or where
        the weights of neighbouring threads, an even number of taps apart, would lie in the same bank of shared memory."""
        return self.channels % 4 == 0 or geometry.taps % 2 == 0

    @property
    def tile_rows(self):
        return self.rows * self.row_groups

    @property
    def tile_cols(self):
        return self.cols * self.col_groups

    def pixel_stage(self, geometry):
        """Shape of a stage of x in shared memory: [depth, rows, columns rounded up to 16 bytes]."""
        height = self.tile_rows + geometry.rows.reach
        width = self.tile_cols + geometry.cols.reach
        return self.depth, height, -(-width // 4) * 4

    def shared_bytes(self, geometry):
        """Two stages of pixels and of weights."""
        depth, height, width = self.pixel_stage(geometry)
        return 8 * depth * (height * width + geometry.taps * self.tile_channels)

    def grid(self, geometry, batch, out_channels, height, width):
        """(channel tiles, row tiles, column tiles, blocks) for an image size."""
        channel_tiles = -(-out_channels // self.tile_channels)
        row_tiles = -(-geometry.rows.cells(height) // self.tile_rows)
        col_tiles = -(-geometry.cols.cells(width) // self.tile_cols)
        return channel_tiles, row_tiles, col_tiles, batch * channel_tiles * row_tiles * col_tiles


@functools.lru_cache(maxsize=64)
def build(geometry: Geometry, tile: Tile, backward=False) -> Kernel:
    """The kernel for a geometry and a tile; image sizes, channels and constants are its arguments.

    With ``backward`` it has one argument more, the gradient at the layer's output, and gives the gradient at the sums.
    """
    KW, SH, SW = geometry.cols.kernel_size, geometry.rows.stride, geometry.cols.stride
    TAPS = geometry.taps
    # Padding rounded up to whole strides keeps k - padding, and so div and mod, from going negative.
    PH, PW = -geometry.rows.padding % SH, -geometry.cols.padding % SW
    LAST_H, LAST_W = (geometry.rows.kernel_size - 1 + PH) // SH, (KW - 1 + PW) // SW
    FIRST_ROW, FIRST_COL = geometry.rows.first_shift, geometry.cols.first_shift

    CHANNELS, ROWS, COLS, DEPTH = tile.channels, tile.rows, tile.cols, tile.depth
    THREADS, CHANNEL_GROUPS, COL_GROUPS = tile.threads, tile.channel_groups, tile.col_groups
    TILE_CHANNELS, TILE_ROWS, TILE_COLS = tile.tile_channels, tile.tile_rows, tile.tile_cols
    _, X_ROWS, X_COLS = tile.pixel_stage(geometry)
    X_STAGE, W_STAGE = DEPTH * X_ROWS * X_COLS, DEPTH * TAPS * TILE_CHANNELS
    X_COPIES, W_COPIES = -(-X_STAGE // THREADS), -(-W_STAGE // (4 * THREADS))
    WEIGHTS, W_ROW = 2 * X_STAGE, TAPS * TILE_CHANNELS
    PACKED = tile.packs(geometry)
    TAP_STEP, CHANNEL_STEP = (TILE_CHANNELS, 1) if PACKED else (1, TAPS)  # from a weight to the next in shared memory
    UNROLL = tile.unroll
    REG_ROWS, REG_COLS = ROWS + geometry.rows.reach, COLS + geometry.cols.reach
    X_VECTORS = REG_COLS // 4 if COLS % 4 == 0 else 0
    W_VECTORS = CHANNELS // 4 if CHANNELS % 4 == 0 else 0
    RUN = SW * COLS  # outputs of a thread that are neighbours in a row

    @device
    def locate_pixel(i, offsets, thread, row, col, height, width):
        e = thread + i * THREADS
        r, c = row + e // X_COLS % X_ROWS, col + e % X_COLS
        offset = (e // (X_COLS * X_ROWS) * height + r) * width + c
        inside = 0 <= r and r < height and 0 <= c and c < width and e < X_STAGE and offset < OUTSIDE
        offsets[i] = int32(offset) if inside else int32(OUTSIDE)

    @device
    def copy_pixel(i, smem, to, x, base, offsets, left, thread):
        if (i + 1) * THREADS <= X_STAGE or i * THREADS + thread < X_STAGE:
            ptx.copy_async(smem, to + i * THREADS + thread, x, base, offsets[i], offsets[i] < left)

    @device
    def copy_packed(i, smem, to, weight, base, offsets, left, whole, thread):
        if (i + 1) * THREADS * 4 <= W_STAGE or (i * THREADS + thread) * 4 < W_STAGE:
            ptx.copy_async4(smem, to + (i * THREADS + thread) * 4, weight, base + i * THREADS * 4, thread * 4)

    @device
    def locate_weights(i, offsets, thread, row):
        e = (i * THREADS + thread) * 4
        offsets[i] = int32(e // W_ROW * row + e % W_ROW)

    @device
    def copy_plain(i, smem, to, weight, base, offsets, left, whole, thread):
        """Zeros below the last input channel; beyond the last output channel whatever comes, for sums that are not stored."""
        if (i + 1) * THREADS * 4 <= W_STAGE or (i * THREADS + thread) * 4 < W_STAGE:
            to = to + (i * THREADS + thread) * 4
            if whole:
                ptx.copy_async4_or_zero(smem, to, weight, base, offsets[i], offsets[i] < left)
            else:
                for j in range(4):
                    ptx.copy_async(smem, to + j, weight, base, offsets[i] + j, offsets[i] + j < left)

    @device
    def clear(i, sums):
        for r in range(ROWS):
            for k in range(CHANNELS):
                for c in range(COLS):
                    sums[i // SW, i % SW, r, k, c] = float32(0)

    @device
    def load_pixels(r, smem, at, pixels):
        for v in range(X_VECTORS):
            four = ptx.load4(smem, at + r * X_COLS + 4 * v)
            for c in range(4):
                pixels[r, 4 * v + c] = four[c]
        for c in range(4 * X_VECTORS, REG_COLS):
            pixels[r, c] = ptx.load(smem, at + r * X_COLS + c)

    @device
    def multiply_tap(tap, smem, at, pixels, weights, sums):
        for v in range(W_VECTORS):
            four = ptx.load4(smem, at + tap * TAP_STEP + 4 * v)
            for k in range(4):
                weights[4 * v + k] = four[k]
        for k in range(4 * W_VECTORS, CHANNELS):
            weights[k] = ptx.load(smem, at + tap * TAP_STEP + k * CHANNEL_STEP)
        kh, kw = tap // KW + PH, tap % KW + PW
        for r in range(ROWS):
            for k in range(CHANNELS):
                for c in range(COLS):
                    sums[kh % SH, kw % SW, r, k, c] += weights[k] * pixels[r + LAST_H - kh // SH, c + LAST_W - kw // SW]

    load_all, multiply_taps = unroll(REG_ROWS, load_pixels), unroll(TAPS, multiply_tap)

    @device
    def multiply_channel(i, smem, x_at, w_at, pixels, weights, sums):
        load_all(smem, x_at + i * X_ROWS * X_COLS, pixels)
        multiply_taps(smem, w_at + i * W_ROW, pixels, weights, sums)

    @device
    def load_run(run, gy, at, vectors, cols_left):
        if vectors:
            for m in range(0, RUN, 4):
                if m < cols_left:
                    run[m], run[m + 1], run[m + 2], run[m + 3] = ptx.load4(gy, at + m)
        else:
            for m in range(RUN):
                if m < cols_left:
                    run[m] = ptx.load(gy, at + m)

    @device
    def store_run(i, sums, biases, run, gy, out, at, plane, width, left, vectors, constants):
        k, r, a = i // (ROWS * SH), i // SH % ROWS, i % SH
        channels_left, rows_left, cols_left = left
        if k < channels_left and r * SH + a < rows_left:
            to = at + k * plane + (r * SH + a) * width
            if backward:
                load_run(run, gy, to, vectors, cols_left)
            for m in range(RUN):
                z = sums[a, m % SW, r, k, m // SW] + biases[k]
                run[m] = gradient(z, run[m], *constants) if backward else activate(z, *constants)
            if vectors:
                for m in range(0, RUN, 4):
                    if m < cols_left:
                        ptx.store4(out, to + m, run[m], run[m + 1], run[m + 2], run[m + 3])
            else:
                for m in range(RUN):
                    if m < cols_left:
                        out[to + m] = run[m]

    locate_pixels, copy_pixels = unroll(X_COPIES, locate_pixel), unroll(X_COPIES, copy_pixel)
    locate_all_weights, copy_weights = unroll(W_COPIES, locate_weights), unroll(W_COPIES, copy_packed if PACKED else copy_plain)
    clear_all = unroll(SH * SW, clear)
    multiply_channels, store_all = unroll(UNROLL, multiply_channel), unroll(CHANNELS * ROWS * SH, store_run)

    @device
    def compute(x, weight, bias, gy, out, sizes, tiles, bias_size, vectors, whole, constants):
        # smem x: 2 x [DEPTH, X_ROWS, X_COLS] fp32, then weights: 2 x [DEPTH, TAPS, TILE_CHANNELS], or if they are not packed
        # [DEPTH, TILE_CHANNELS, TAPS] fp32
        smem = cuda.shared.array(0, float32)
        offsets, w_offsets = cuda.local.array(X_COPIES, int32), cuda.local.array(W_COPIES, int32)
        pixels = cuda.local.array((REG_ROWS, REG_COLS), float32)
        weights = cuda.local.array(CHANNELS, float32)
        sums = cuda.local.array((SH, SW, ROWS, CHANNELS, COLS), float32)

        in_channels, height, width, out_channels, out_height, out_width = sizes
        channel_tiles, row_tiles, col_tiles = tiles
        thread, block = int32(cuda.threadIdx.x), int32(cuda.blockIdx.x)
        col_group = int32(thread % COL_GROUPS)
        channel_group = int32(thread // COL_GROUPS % CHANNEL_GROUPS)
        row_group = int32(thread // (COL_GROUPS * CHANNEL_GROUPS))
        channel_tile = int32(block % channel_tiles)  # neighbours share their pixels in L2
        col = int32(block // channel_tiles % col_tiles * TILE_COLS)
        row = int32(block // (channel_tiles * col_tiles) % row_tiles * TILE_ROWS)
        image = int64(block // (channel_tiles * col_tiles * row_tiles))

        channel = int32(channel_tile * TILE_CHANNELS + channel_group * CHANNELS)
        out_row, out_col = int32((row + row_group * ROWS) * SH), int32((col + col_group * COLS) * SW)
        at = ((image * out_channels + channel) * out_height + out_row) * out_width + out_col
        left = int32(out_channels - channel), int32(out_height - out_row), int32(out_width - out_col)

        locate_pixels(offsets, thread, int32(row + FIRST_ROW), int32(col + FIRST_COL), height, width)
        clear_all(sums)
        stages = int32((in_channels + DEPTH - 1) // DEPTH)
        step = int32(DEPTH * height * width)
        x_base, x_left = image * in_channels * height * width, int32(in_channels * height * width)
        w_row = int32(out_channels * TAPS)
        if PACKED:
            w_base, w_step, w_left = int64(channel_tile) * stages * W_STAGE, int32(W_STAGE), int32(0)
        else:
            w_base, w_step = int64(channel_tile) * W_ROW, int32(DEPTH * w_row)
            w_left = int32(in_channels * w_row - channel_tile * W_ROW)
            locate_all_weights(w_offsets, thread, w_row)
        for stage in range(int32(0), int32(stages + 1)):
            if stage < stages:
                half = int32(stage & 1)
                copy_pixels(smem, int32(half * X_STAGE), x, x_base, offsets, x_left, thread)
                copy_weights(smem, int32(WEIGHTS + half * W_STAGE), weight, w_base, w_offsets, w_left, whole, thread)
                x_base, x_left, w_base, w_left = x_base + step, int32(x_left - step), w_base + w_step, int32(w_left - w_step)
            if stage > 0:
                half = int32(1 - (stage & 1))
                x_at = int32(half * X_STAGE + row_group * ROWS * X_COLS + col_group * COLS)
                w_at = int32(WEIGHTS + half * W_STAGE + channel_group * CHANNELS * CHANNEL_STEP)
                for _ in range(int32(DEPTH // UNROLL)):
                    multiply_channels(smem, x_at, w_at, pixels, weights, sums)
                    x_at, w_at = int32(x_at + UNROLL * X_ROWS * X_COLS), int32(w_at + UNROLL * W_ROW)
            ptx.copy_wait()
            cuda.syncthreads()

        biases = cuda.local.array(CHANNELS, float32)
        run = cuda.local.array(RUN, float32)
        for k in range(CHANNELS):
            biases[k] = bias[channel + k] if channel + k < bias_size else float32(0)
        store_all(sums, biases, run, gy, out, at, int64(out_height) * out_width, out_width, left, vectors, constants)

    def tiled(x, weight, bias, out, sizes, tiles, bias_size, vectors, whole, constants):
        compute(x, weight, bias, out, out, sizes, tiles, bias_size, vectors, whole, constants)  # gy is not read

    def tiled_backward(x, weight, bias, gy, out, sizes, tiles, bias_size, vectors, whole, constants):
        compute(x, weight, bias, gy, out, sizes, tiles, bias_size, vectors, whole, constants)

    pointer, tuple_of = types.CPointer(types.float32), types.UniTuple
    sizes, tiles, constants = tuple_of(types.int32, 6), tuple_of(types.int32, 3), tuple_of(types.float32, 4)
    arrays = [pointer] * (5 if backward else 4)
    signature = types.void(*arrays, sizes, tiles, types.int32, types.boolean, types.boolean, constants)
    return Kernel(tiled_backward if backward else tiled, signature, THREADS, tile.blocks, (geometry, tile))


@dataclass(frozen=True)
class Plan:
    """All that a launch takes but the arrays and the constants, for one geometry, tile and size."""

    kernel: Kernel
    blocks: int
    shapes: dict  # of the arrays, by name
    sizes: tuple  # in_channels, height, width, out_channels, out_height, out_width
    tiles: tuple  # along channels, rows, columns
    shared_bytes: int
    wide: bool  # outputs may be stored by four, where they are aligned
    whole: bool  # weights may be copied by four, where they are aligned

    def prepare(self, device):
        """A function ``(x, weight, bias, outputs, constants)``: ``launch`` of tensors that fit, which is not checked."""
        if not self.blocks:
            return lambda *args: None
        start = self.kernel.prepare(device, self.blocks, self.sizes, self.tiles, shared_bytes=self.shared_bytes)

        def launch(x, weight, bias, outputs, constants):
            vectors = self.wide and not (outputs[0].data_ptr() | outputs[-1].data_ptr()) % 16
            whole = self.whole and weight.data_ptr() % 16 == 0
            bias, bias_size = (x, 0) if bias is None else (bias, bias.numel())
            start((x, weight, bias, *outputs), (bias_size, vectors, whole), constants)

        return launch


def too_large(geometry, tile, batch, in_channels, out_channels, height, width) -> str:
    """Why the kernel's 32-bit numbers do not hold a size, or an empty string."""
    if in_channels * height * width >= 2**31:
        return "an image has 2^31 values or more"
    if max(out_channels, geometry.rows.output_size(height), geometry.cols.output_size(width)) >= 2**31:
        return "an output has 2^31 channels, rows or columns, or more"
    if tile.grid(geometry, batch, out_channels, height, width)[-1] >= 2**31:
        return "it would take 2^31 blocks or more"
    if -(-in_channels // tile.depth) * tile.depth * out_channels * geometry.taps >= 2**31:
        return "the weight has 2^31 values or more"
    return ""


@functools.lru_cache(maxsize=1024)
def plan(geometry, tile, batch, in_channels, out_channels, height, width, backward=False) -> Plan:
    if reason := too_large(geometry, tile, batch, in_channels, out_channels, height, width):
        raise ValueError(f"{reason}: x is {(batch, in_channels, height, width)}")
    *tiles, blocks = tile.grid(geometry, batch, out_channels, height, width)
    out_size = geometry.rows.output_size(height), geometry.cols.output_size(width)
    padded = -(-in_channels // tile.depth) * tile.depth
    packed, plain = (tiles[0], padded, geometry.taps, tile.tile_channels), (in_channels, out_channels, *geometry.kernel_size)
    sizes = in_channels, height, width, out_channels, *out_size
    shapes = {
        "out": (batch, out_channels, *out_size),
        "gy": (batch, out_channels, *out_size),
        "weight": packed if tile.packs(geometry) else plain,
        "bias": (out_channels,),
    }
    kernel, shared_bytes = build(geometry, tile, backward), tile.shared_bytes(geometry)
    wide, whole = out_size[1] % 4 == tile.cols * geometry.cols.stride % 4 == 0, out_channels * geometry.taps % 4 == 0
    return Plan(kernel, blocks, shapes, sizes, tuple(tiles), shared_bytes, wide, whole)


def packer(geometry, tile):
    """A function that gives a weight as the kernel for a tile takes it: packed, or contiguous."""
    if not tile.packs(geometry):
        return torch.Tensor.contiguous
    return lambda weight: packing.pack_tiled(weight, tile.depth, tile.tile_channels)


def launch(x, weight, bias, out, geometry, tile, add_value, scale, min_val=-1.0, max_val=1.0, gy=None):
    """Fill ``out`` [N, C_out, H_out, W_out] from ``x`` [N, C_in, H, W]; fp32, contiguous, one device.

    ``weight`` is what ``packer`` makes of it for this tile; ``bias`` [C_out] or None. With ``gy``, of the shape
    of ``out``, a gradient at the layer's output, ``out`` becomes the gradient at the pre-activation. Every
    array may be a tensor or anything with ``__cuda_array_interface__``. Raises TypeError for another
    dtype and ValueError for strides or sizes that do not fit.
    """
    x, weight, out = contiguous("x", x), contiguous("weight", weight), contiguous("out", out)
    bias = None if bias is None else contiguous("bias", bias)
    outputs = [out] if gy is None else [contiguous("gy", gy), out]
    batch, in_channels, height, width = x.shape
    planned = plan(geometry, tile, batch, in_channels, out.shape[1], height, width, gy is not None)
    for name, array in (("out", out), ("gy", outputs[0]), ("weight", weight), ("bias", bias)):
        if array is not None and array.shape != planned.shapes[name]:
            raise ValueError(f"{name} must have shape {planned.shapes[name]}, got {tuple(array.shape)}")
    if tile.packs(geometry) and weight.data_ptr() % 16:
        raise ValueError(f"packed weights must begin at a multiple of 16 bytes, got {weight.data_ptr():#x}")
    planned.prepare(x.device)(x, weight, bias, outputs, (add_value, scale, min_val, max_val))
