"""Transposed convolution k3 s2 p1 on Hopper's tensor cores at fp32 accuracy, parity-split, with the epilogue fused.

Every fp32 operand is the sum of two fp16 numbers, hi + lo, 22 bits; x * w is then
lo * hi + hi * lo + hi * hi, three products ("terms") into fp32 sums, or hi * hi alone for TF32.
Powers of two scale x and w so that neither leaves fp16's range; the epilogue takes them back.

A block stays on its multiprocessor and computes a run of *units*: a row of 64 cells, every output channel
and parity. One warpgroup, the producer, loads rows of x, splits them, and puts them in a ring in shared
memory; two others, the consumers, take the units in turn: multiply, activate, store. While one multiplies,
the other does all else. A row is used by two units: as their cells' own row, and as the row below.

A unit whose values no scale fits (not finite, or too far apart) is computed in plain fp32 instead. The backward's
kernel is the same but for its end, where it stores the epilogue's gradient at the sums.
"""

import functools
from dataclasses import dataclass

from numba import cuda, float32, int32, int64, uint8
from numba.cuda import types

from numba_impl.backends.hopper import exact as plain
from numba_impl.backends.hopper import scaling
from numba_impl.backends.hopper import weights as split
from numba_impl.backends.hopper.products import products
from numba_impl.cuda import fragments, ptx, tensor_map
from numba_impl.cuda.device import device, unroll
from numba_impl.cuda.kernel import Kernel, as_tensor, contiguous, multiprocessors
from numba_impl.problem import Geometry

CAPABILITY = (9, 0)  # wgmma and setmaxnreg are of sm_90a alone
MAX_CHANNELS = 64
STRIP = 64  # cells of a unit
BOX = STRIP + 4  # pixels of a row that the bulk copy engine loads: the strip and the one beside it, in multiples of 16 bytes
MAXIMA_BYTES = 8 * STRIP + 16  # of a row's largest |x|: its pixels', by halves of the channels, and the one's beside
PLANE = fragments.pixel_offset(STRIP - 1) + 144  # bytes of a row's hi or lo: its pixels and the one beside
THREADS = 384
PRODUCER_REGISTERS, CONSUMER_REGISTERS = 88, 208

# Cycles, measured on an H200: before the first unit; a wgmma; and of a unit's output channel, all that is not wgmma.
START, PRODUCT, CHANNEL = 15_000, 40, 140
ANY, NONE = -1.0, 0.0  # instead of what undoes a row's scale: the row is zero; no scale fits

activate, gradient = plain.activate, plain.gradient
accumulator, loaded_row, pixel_of, stored_lane, pixel_offset = map(
    device, (fragments.accumulator, fragments.loaded_row, fragments.pixel, fragments.stored_lane, fragments.pixel_offset)
)
scale_fits, choose_scale = scaling.build(device)


@dataclass(frozen=True)
class Config:
    """What a kernel is compiled for: channels, multiples of 8; ``terms``, 3 or 1; and ``vector``, how many fp32 at the
    start of a row of outputs are one aligned access: 4, 2 or 1; ``bulk``: the bulk copy engine loads x, whose rows are
    multiples of 16 bytes; ``backward``: it gives the gradient at the pre-activation."""

    in_channels: int
    out_channels: int
    terms: int
    vector: int
    bulk: bool = True
    backward: bool = False

    @property
    def steps(self):
        """Products along the input channels, of 16 each."""
        return -(-self.in_channels // 16)

    @property
    def halves(self):
        """Of x and of w in shared memory: hi, and with three terms lo."""
        return 2 if self.terms == 3 else 1

    @property
    def half_bytes(self):
        """Of the weights' hi or lo: [9 taps, in_channels / 8, out_channels, 8] fp16."""
        return 9 * 16 * self.steps * self.out_channels * 2

    @property
    def row_bytes(self):
        """Of a row of the ring."""
        return PLANE * self.halves

    @property
    def slots(self):
        """Rows of the ring: two that are multiplied, and what else there is room for."""
        return 3 if self.terms == 3 else 4

    @property
    def stages(self):
        """Rows of x as they are, that the bulk copy engine loads ahead."""
        return 1 if self.terms == 3 else 2

    @property
    def stage_bytes(self):
        """Of such a row: [in_channels, BOX] fp32."""
        return 4 * BOX * self.in_channels

    @property
    def shared_bytes(self):
        """Weights, stages, ring, and 1200 + 8 * out_channels bytes of small things: see ``build``."""
        rows = self.stages * self.stage_bytes + self.slots * self.row_bytes
        return self.half_bytes * self.halves + rows + 8 * self.out_channels + 1200


def schedule(config: Config):
    """The products of a unit, as ``products`` takes them: (loads, multiplications) a step.

    Bases are (row, shift) of x, 0..3; tiles are output parities, 0..3. The small terms come first: the
    tensor core truncates at every addition, by an amount in proportion to the sum so far.
    """
    axis = Geometry.of(3, 2, 1).rows
    lo_x, lo_w = PLANE, config.half_bytes // 16
    tap_size, step_size = config.half_bytes // 9 // 16, 2 * config.out_channels
    steps = []
    for x_offset, w_offset in ((lo_x, 0), (0, lo_w), (0, 0))[-config.terms :]:
        descriptor = int(x_offset == w_offset)  # hi * hi uses another one than lo * hi, see where they are made
        for k in range(config.steps):
            for bases in ((0,), (1, 2, 3)):
                loads = [(base, 32 * k + x_offset) for base in bases]
                multiplications = []
                for tap in range(9):
                    parity, base = (2 * of[tap // 3] + of[tap % 3] for of in (axis.parities, axis.shifts))
                    if base in bases:
                        at = w_offset + tap * tap_size + k * step_size
                        multiplications.append((parity, bases.index(base), descriptor, at))
                steps.append((loads, multiplications))
    return steps


@functools.lru_cache(maxsize=64)
def build(config: Config) -> Kernel:
    """The kernel for a configuration; image sizes and constants are its arguments."""
    C_IN, C_OUT, STEPS, VECTOR = config.in_channels, config.out_channels, config.steps, config.vector
    SUMS, COUNT = C_OUT // 2, 8 * STEPS  # a consumer thread's sums of a parity; a producer thread's channels
    SPLIT, ROW, BULK, BACKWARD = config.terms == 3, config.row_bytes, config.bulk, config.backward
    SLOTS, STAGES, STAGE_BYTES = config.slots, config.stages, config.stage_bytes
    WEIGHT_BYTES = config.half_bytes * config.halves  # smem weights: [hi, lo][9, C_IN / 8, C_OUT, 8] fp16
    STAGE = WEIGHT_BYTES  # smem [STAGES, C_IN, BOX] fp32
    RING = STAGE + STAGES * STAGE_BYTES  # smem [SLOTS, hi and lo] of pixels, fragments.pixel_offset, of [64 channels] fp16
    CHANNELS = RING + SLOTS * ROW  # smem [C_OUT] (factor, bias)
    MAXIMA = CHANNELS + 8 * C_OUT  # smem [2, 2 halves of the channels, STRIP] bits of a pixel's largest |x|, and [2, 2] beside
    SIZES = MAXIMA + 2 * MAXIMA_BYTES  # smem height, width, out_height, out_width
    SCALES = SIZES + 16  # smem [SLOTS] what undoes a row's scale, or ANY or NONE
    FULL = SCALES + 16  # smem barriers [SLOTS]: the row is there
    EMPTY = FULL + 8 * SLOTS  # and it has been used
    STAGED = EMPTY + 8 * SLOTS  # smem barriers [STAGES]: the row of x is there
    LOADED = STAGED + 8 * STAGES  # smem barrier: the weights are there
    DESCRIPTOR = LOADED + 8  # smem low half of theirs
    # High half of the weights' descriptors: no swizzle, bytes between columns of 8 channels and between groups of 8 rows.
    LAYOUT = (16 * C_OUT >> 4) << 16 | (128 >> 4) << 32
    BESIDE = fragments.pixel_offset(STRIP)

    multiply = products(schedule(config), C_OUT)
    compute_plainly = plain.build(C_IN, C_OUT, STRIP, 128, not SPLIT, BACKWARD)
    fewer_registers = ptx.set_registers(PRODUCER_REGISTERS, more=False)
    more_registers = ptx.set_registers(CONSUMER_REGISTERS, more=True)

    @device
    def ring_of(load, count):
        """(index in a ring of a few, parity of its phase) of a row, counted from the block's first."""
        turn = int32(int64(load) * -(-(2**32) // count) >> 32)  # load // count
        return int32(load - turn * count), int32(turn & 1)

    # The producer: a thread has a pixel and half of the channels, warp 0 besides two channels a lane of the pixel beside.

    @device
    def following(row, image, height):
        """(row, image) after one; the row below an image, zeros, ends it."""
        last = row == height
        return int32(0) if last else int32(row + 1), int32(image + 1) if last else image

    @device
    def stage_of(load):
        """(offset of a row's stage, of its barrier, parity of its phase)."""
        stage, phase = ring_of(load, STAGES)
        return int32(STAGE + stage * STAGE_BYTES), int32(STAGED + 8 * stage), phase

    @device
    def ask(thread, x_map, base, load, loads, cell, row, image):
        """Let the bulk copy engine load a row into its stage, if there is such a row."""
        if thread == 0 and load < loads:
            at, staged, _ = stage_of(load)
            ptx.mbarrier_arrive_expect(base + staged, STAGE_BYTES)
            ptx.bulk_copy_box(base + at, x_map, cell, row, 0, image, base + staged)

    @device
    def read_value(i, values, at, half):
        values[i] = ptx.load_shared_or_zero(at + 4 * BOX * i, C_IN == 2 * COUNT or half * COUNT + i < C_IN)

    @device
    def load_value(i, values, at, plane, half, inside):
        keep = inside if C_IN == 2 * COUNT else inside and half * COUNT + i < C_IN
        values[i] = ptx.load_or_zero(at + i * plane, keep)

    @device
    def measure(i, values, largest):
        for j in range(4):
            largest[j] = ptx.maximum(largest[j], abs(values[4 * i + j]))

    @device
    def store_chunk(i, values, scale, at):
        if SPLIT:
            h0, l0 = ptx.split_half2(values[8 * i] * scale, values[8 * i + 1] * scale)
            h1, l1 = ptx.split_half2(values[8 * i + 2] * scale, values[8 * i + 3] * scale)
            h2, l2 = ptx.split_half2(values[8 * i + 4] * scale, values[8 * i + 5] * scale)
            h3, l3 = ptx.split_half2(values[8 * i + 6] * scale, values[8 * i + 7] * scale)
            ptx.store_shared4_bits(at + 16 * i, h0, h1, h2, h3)
            ptx.store_shared4_bits(at + 16 * i + PLANE, l0, l1, l2, l3)
        else:
            h0 = ptx.half2(values[8 * i] * scale, values[8 * i + 1] * scale)
            h1 = ptx.half2(values[8 * i + 2] * scale, values[8 * i + 3] * scale)
            h2 = ptx.half2(values[8 * i + 4] * scale, values[8 * i + 5] * scale)
            h3 = ptx.half2(values[8 * i + 6] * scale, values[8 * i + 7] * scale)
            ptx.store_shared4_bits(at + 16 * i, h0, h1, h2, h3)

    read_values, load_values, measure_all = unroll(COUNT, read_value), unroll(COUNT, load_value), unroll(COUNT // 4, measure)
    store_chunks = unroll(STEPS, store_chunk)

    @device
    def read_row(values, beside, base, load, pixel, half, warp, lane):
        at, staged, phase = stage_of(load)
        ptx.mbarrier_wait(base + staged, phase)
        read_values(values, int32(base + at + 4 * (half * COUNT * BOX + pixel)), half)
        for j in range(2):
            beside[j] = ptx.load_shared_or_zero(base + at + 4 * ((2 * lane + j) * BOX + STRIP), warp == 0 and 2 * lane < C_IN)

    @device
    def load_row(values, beside, x, image, cell, row, height, width, plane, pixel, half, warp, lane):
        at = ptx.global_address(x) + image * C_IN * plane + (int64(row) * width + cell) * 4
        load_values(values, at + half * COUNT * plane + pixel * 4, plane, half, row < height and cell + pixel < width)
        inside = warp == 0 and row < height and cell + STRIP < width and 2 * lane < C_IN
        for j in range(2):
            beside[j] = ptx.load_or_zero(at + (2 * lane + j) * plane + STRIP * 4, inside)

    @device
    def row_range(values, beside, maxima, thread, warp, lane):
        """(largest, smallest) over the row's pixels of a pixel's largest |x|, as bits; zero pixels do not count below."""
        largest = cuda.local.array(4, float32)
        for j in range(4):
            largest[j] = float32(0)
        measure_all(values, largest)
        own = ptx.maximum(ptx.maximum(largest[0], largest[1]), ptx.maximum(largest[2], largest[3]))
        ptx.store_shared(maxima + 4 * thread, own)
        if warp == 0:
            edge = ptx.warp_max(ptx.bits(ptx.maximum(abs(beside[0]), abs(beside[1]))))
            ptx.store_shared2_bits(maxima + 8 * STRIP, edge, edge)
        ptx.barrier_sync(1, 128)
        a0, a1 = ptx.load_shared2_bits(maxima + 8 * lane)
        b0, b1 = ptx.load_shared2_bits(maxima + 8 * lane + 4 * STRIP)
        edge, _ = ptx.load_shared2_bits(maxima + 8 * STRIP)
        a0, a1 = max(a0, b0), max(a1, b1)
        low = min(min(nonzero(a0), nonzero(a1)), nonzero(edge))
        return ptx.warp_max(max(max(a0, a1), edge)), ptx.warp_min(low)

    @device
    def nonzero(bits):
        return bits if bits > 0 else int32(scaling.INFINITE)

    @device
    def produce(x, x_map, base, thread, cell, first, last, height, width):
        fewer_registers()
        values, beside = cuda.local.array(COUNT, float32), cuda.local.array(2, float32)
        lane, warp = int32(thread % 32), int32(thread // 32)
        pixel, half = int32(thread % STRIP), int32(thread // STRIP)
        at_pixel = int32(base + RING + pixel_offset(pixel) + half * 16 * STEPS)
        plane = int64(height) * width * 4
        image = ptx.divide(first, height)
        row = int32(first - image * height)
        # One row more than units of an image: the row below the last unit's.
        loads = int32(last - first + ptx.divide(last - 1, height) - image + 1)
        split_weights = True
        for channel in range(C_OUT):
            factor, _ = ptx.load_shared2(base + CHANNELS + 8 * channel)
            split_weights = split_weights and factor != 0
        row_asked, image_asked = row, image
        shift = int32(scaling.FIRST)
        if BULK:
            x_map = ptx.global_address(x_map)
            if thread == 0:
                ptx.tensor_map_fence(x_map)
            for load in range(STAGES):
                ask(thread, x_map, base, load, loads, cell, row_asked, image_asked)
                row_asked, image_asked = following(row_asked, image_asked, height)
        for load in range(loads):
            if BULK:
                read_row(values, beside, base, load, pixel, half, warp, lane)
            else:
                load_row(values, beside, x, image, cell, row, height, width, plane, pixel, half, warp, lane)
            high, low = row_range(values, beside, int32(base + MAXIMA + (load & 1) * MAXIMA_BYTES), thread, warp, lane)
            if BULK:  # every thread has read the stage, as row_range waits for all
                ask(thread, x_map, base, load + STAGES, loads, cell, row_asked, image_asked)
                row_asked, image_asked = following(row_asked, image_asked, height)
            shift = int32(choose_scale(shift, high, low))
            scale = ptx.from_bits(int32((127 + shift) << 23))
            slot, phase = ring_of(load, SLOTS)
            if load >= SLOTS:
                ptx.mbarrier_wait(base + EMPTY + slot * 8, phase ^ 1)
            store_chunks(values, scale, int32(at_pixel + slot * ROW))
            if warp == 0 and lane < 8 * STEPS:
                to = int32(base + RING + slot * ROW + BESIDE + 4 * lane)
                edge_hi, edge_lo = ptx.split_half2(beside[0] * scale, beside[1] * scale)
                ptx.store_shared_bits(to, edge_hi)
                if SPLIT:
                    ptx.store_shared_bits(to + PLANE, edge_lo)
            if thread == 0:
                undo = ptx.from_bits(int32((127 - shift) << 23))
                undo = float32(ANY) if high == 0 else undo if scale_fits(shift, high, low) else float32(NONE)
                ptx.store_shared(base + SCALES + slot * 4, undo if split_weights else float32(NONE))
            ptx.mbarrier_arrive(base + FULL + slot * 8)
            row, image = following(row, image, height)

    # A consumer: a thread has two pixels' two column parities, 16 bytes of a row of outputs, and stores another's.

    @device
    def finish(z, constants):
        return z if BACKWARD else activate(z, *constants)

    @device
    def load_run(at, left):
        if VECTOR == 4:
            return ptx.load4_or_zero(at, left > 0)
        return (
            ptx.load_or_zero(at, left > 0),
            ptx.load_or_zero(at + 4, left > 1),
            ptx.load_or_zero(at + 8, left > 2),
            ptx.load_or_zero(at + 12, left > 3),
        )

    @device
    def store_run(row, j, e, sums, factor, bias, source, to, left, from_out, constants):
        """Of one channel and row parity: four neighbours, of which the first ``left`` are inside the image."""
        y0 = finish(sums[2 * row, 4 * j + e] * factor + bias, constants)
        y1 = finish(sums[2 * row + 1, 4 * j + e] * factor + bias, constants)
        y2 = finish(sums[2 * row, 4 * j + e + 2] * factor + bias, constants)
        y3 = finish(sums[2 * row + 1, 4 * j + e + 2] * factor + bias, constants)
        y0, y1 = cuda.shfl_sync(0xFFFFFFFF, y0, source), cuda.shfl_sync(0xFFFFFFFF, y1, source)
        y2, y3 = cuda.shfl_sync(0xFFFFFFFF, y2, source), cuda.shfl_sync(0xFFFFFFFF, y3, source)
        if BACKWARD:
            g0, g1, g2, g3 = load_run(to + from_out, left)
            y0, y1 = gradient(y0, g0, *constants), gradient(y1, g1, *constants)
            y2, y3 = gradient(y2, g2, *constants), gradient(y3, g3, *constants)
        if VECTOR == 4:
            ptx.stream4(to, y0, y1, y2, y3, left > 0)
        elif VECTOR == 2:
            ptx.stream2(to, y0, y1, left > 0)
            ptx.stream2(to + 8, y2, y3, left > 2)
        else:
            ptx.stream(to, y0, left > 0)
            ptx.stream(to + 4, y1, left > 1)
            ptx.stream(to + 8, y2, left > 2)
            ptx.stream(to + 12, y3, left > 3)

    @device
    def store_channel(i, sums, channels, undo, source, at, plane, left, from_out, constants):
        j, e = i // 2, i % 2
        factor, bias = ptx.load_shared2(channels + 8 * (8 * j + e))
        factor = factor * undo
        store_run(0, j, e, sums, factor, bias, source, at[0], left[0], from_out, constants)
        store_run(1, j, e, sums, factor, bias, source, at[1], left[1], from_out, constants)
        step = 7 * plane if e else plane  # counted up, as products for every channel would fill the registers
        at[0], at[1] = at[0] + step, at[1] + step

    store_channels = unroll(C_OUT // 4, store_channel)

    @device
    def consume(x, weight, bias, gy, out, base, thread, consumer, cell, first, last, sizes, constants):
        more_registers()
        sums, at = cuda.local.array((4, SUMS), float32), cuda.local.array(2, int64)
        height, width, out_height, out_width = sizes
        lane = int32(thread % 32)
        # Where it points ldmatrix, in a row of the ring, for x and for x shifted by a pixel.
        row_a, k = loaded_row(thread)
        at_0 = int32(base + RING + pixel_offset(pixel_of(row_a)) + 2 * k)
        at_1 = int32(base + RING + pixel_offset(pixel_of(row_a) + 1) + 2 * k)
        # It has sums of channels column, column + 1, column + 8, ...; and stores those of another lane.
        _, column = accumulator(thread, 0)
        channels = int32(base + CHANNELS + 8 * column)
        source = int32(stored_lane(lane))
        row_d, stored_column = accumulator(thread - lane + source, 0)
        pair = int32(pixel_of(row_d))
        plane, row_bytes = int64(out_height) * out_width * 4, int64(out_width) * 4
        corner = ptx.global_address(out) + stored_column * plane + 8 * (cell + pair)
        from_out = ptx.global_address(gy) - ptx.global_address(out)
        image = ptx.divide(first, height)
        row, load, steps = int32(first - image * height), int32(0), consumer
        turn, next_turn = int32(2 + consumer), int32(3 - consumer)  # named barriers
        if consumer == 1:
            ptx.barrier_arrive(next_turn, 256)
        ptx.mbarrier_wait(base + LOADED, 0)
        for _ in range(int32(first + consumer), last, int32(2)):
            row, load, steps = int32(row + steps), int32(load + steps), int32(2)
            while row >= height:
                row, load, image = int32(row - height), int32(load + 1), int32(image + 1)
            (slot, phase), (slot_below, phase_below) = ring_of(load, SLOTS), ring_of(load + 1, SLOTS)
            ptx.mbarrier_wait(base + FULL + slot * 8, phase)
            ptx.mbarrier_wait(base + FULL + slot_below * 8, phase_below)
            undo, undo_below = ptx.load_shared(base + SCALES + slot * 4), ptx.load_shared(base + SCALES + slot_below * 4)
            # Twice the same, but the compiler cannot know: it would keep 36 descriptors in registers from pass to pass.
            weights = ptx.load_shared_anew(base + DESCRIPTOR), ptx.load_shared_anew(base + DESCRIPTOR)
            weights = weights[0] | LAYOUT, weights[1] | LAYOUT
            below = int32(slot_below * ROW)
            multiply(sums, (at_0 + slot * ROW, at_1 + slot * ROW, at_0 + below, at_1 + below), weights, turn, next_turn)
            if lane == 0:  # a row's two uses; the first row of a run or image has no unit above, the last none of its own
                ptx.mbarrier_arrive(base + EMPTY + slot * 8)
                if load == 0 or row == 0:
                    ptx.mbarrier_arrive(base + EMPTY + slot * 8)
                ptx.mbarrier_arrive(base + EMPTY + slot_below * 8)
                if row == height - 1:
                    ptx.mbarrier_arrive(base + EMPTY + slot_below * 8)
            if undo == ANY:
                undo = undo_below
            if undo != NONE and (undo_below == undo or undo_below == ANY):
                left = int32(out_width - 2 * (cell + pair))
                left_below = left if 2 * row + 1 < out_height else int32(0)
                at[0] = corner + image * C_OUT * plane + 2 * row * row_bytes
                at[1] = at[0] + row_bytes
                store_channels(sums, channels, undo, source, at, plane, (left, left_below), from_out, constants)
            else:
                # Sizes from shared memory, so that what follows from them is not kept in registers all the time.
                sizes_0, sizes_1 = ptx.load_shared2_bits(base + SIZES), ptx.load_shared2_bits(base + SIZES + 8)
                compute_plainly(thread, x, weight, bias, gy, out, image, row, cell, sizes_0 + sizes_1, constants)

    @device
    def compute(x, packed, factors, x_map, weight, bias, gy, out, units, strips, sizes, constants):
        base = ptx.shared_address(cuda.shared.array(0, uint8))
        thread, height, width = int32(cuda.threadIdx.x), sizes[0], sizes[1]
        if thread == 0:
            for slot in range(SLOTS):
                ptx.mbarrier_init(base + FULL + 8 * slot, 128)
                ptx.mbarrier_init(base + EMPTY + 8 * slot, 8)  # four warps of each of a row's two uses
            for stage in range(STAGES):
                ptx.mbarrier_init(base + STAGED + 8 * stage, 1)
            ptx.mbarrier_init(base + LOADED, 1)
            ptx.mbarrier_init_fence()
            ptx.mbarrier_arrive_expect(base + LOADED, WEIGHT_BYTES)
            ptx.bulk_copy(base, ptx.global_address(packed), WEIGHT_BYTES, base + LOADED)
            ptx.store_shared_bits(base + DESCRIPTOR, base >> 4)
            ptx.store_shared2_bits(base + SIZES, sizes[0], sizes[1])
            ptx.store_shared2_bits(base + SIZES + 8, sizes[2], sizes[3])
        if thread < C_OUT:
            ptx.store_shared2(base + CHANNELS + thread * 8, factors[thread], bias[thread])
        cuda.syncthreads()

        # A block has one strip of all images, so that neighbours read and write whole rows together.
        block, blocks = int32(cuda.blockIdx.x), ptx.divide(int32(cuda.gridDim.x), strips)
        position = ptx.divide(block, strips)
        cell = int32((block - position * strips) * STRIP)
        share = ptx.divide(units, blocks)
        more = int32(units - share * blocks)  # blocks that take one unit more
        first = int32(share * position + min(position, more))
        last = int32(first + share + int32(position < more))
        group = cuda.shfl_sync(0xFFFFFFFF, thread // 128, 0)  # by a shuffle, so that the compiler knows it is the same for a warp
        if group == 0:
            produce(x, x_map, base, thread, cell, first, last, height, width)
        else:
            consume(x, weight, bias, gy, out, base, int32(thread % 128), int32(group - 1), cell, first, last, sizes, constants)

    def hopper(x, packed, factors, x_map, weight, bias, out, units, strips, sizes, constants):
        compute(x, packed, factors, x_map, weight, bias, out, out, units, strips, sizes, constants)  # gy is not read

    def hopper_backward(x, packed, factors, x_map, weight, bias, gy, out, units, strips, sizes, constants):
        compute(x, packed, factors, x_map, weight, bias, gy, out, units, strips, sizes, constants)

    pointer, tuple_of = types.CPointer, types.UniTuple
    f, i = types.float32, types.int32
    arrays = pointer(f), pointer(i), pointer(f), pointer(types.int64), *[pointer(f)] * (4 if BACKWARD else 3)
    signature = types.void(*arrays, i, i, tuple_of(i, 4), tuple_of(f, 4))
    return Kernel(hopper_backward if BACKWARD else hopper, signature, THREADS, 1, config)


def too_large(batch, height, width) -> str:
    """Why the kernel's 32-bit numbers do not hold a size, or an empty string."""
    if batch * (height + 1) >= 2**31 or width >= 2**29:
        return "a batch of rows, or a row, is too long for its 32-bit counters"
    return ""


def map_of(x):
    """What tells the bulk copy engine of x [N, C_in, H, W], for ``split.launch``: a box is a strip's row and what is beside."""
    return tensor_map.encode(x, (BOX, 1, x.shape[1], 1))


def grid(batch, height, width, multiprocessors):
    """(strips of an image, units of a strip, blocks to launch)."""
    strips, units = -(-width // STRIP), batch * height
    return strips, units, strips * min(units, max(1, multiprocessors // strips))


def cycles(config: Config, batch, height, width, multiprocessors):
    """Predicted time of a call: what a block starts with, and its units one after another, two at a time."""
    strips, units, blocks = grid(batch, height, width, multiprocessors)
    products = 9 * config.steps * config.terms
    unit = config.out_channels * (PRODUCT * products / MAX_CHANNELS + CHANNEL) / 2
    waves = -(-blocks // multiprocessors)
    return waves * (START + unit * -(-units * strips // blocks)) if blocks else 0


def launch(x, packed, factors, x_map, weight, bias, out, terms, add_value, scale, min_val=-1.0, max_val=1.0, gy=None):
    """Fill ``out`` [N, C_out, H_out, W_out] from ``x`` [N, C_in, H, W]; fp32, contiguous, one device of sm_90.

    H_out is 2 H or 2 H - 1, W_out is 2 W or 2 W - 1: an output padding of 1 or 0 on each axis. ``packed``, ``factors`` and
    ``x_map`` are what ``split.launch`` makes of the weights and x; ``weight`` [C_in, C_out, 3, 3] and ``bias`` [C_out] are as
    they are. Channels are multiples of 8 up to 64. ``terms``: 3 for fp32 accuracy, 1 for TF32's. With ``gy``, of the shape of
    ``out``, a gradient at the layer's output, ``out`` becomes the gradient at the pre-activation. Raises TypeError for
    another dtype and ValueError for strides, sizes or terms that do not fit.
    """
    arrays = {"x": x, "weight": weight, "bias": bias, "out": out}
    x, weight, bias, out = (contiguous(name, array) for name, array in arrays.items())
    outputs = [out] if gy is None else [contiguous("gy", gy), out]
    packed, factors, x_map = map(as_tensor, (packed, factors, x_map))
    batch, in_channels, height, width = x.shape
    out_channels, out_height, out_width = out.shape[1:]
    for name, channels in (("in_channels", in_channels), ("out_channels", out_channels)):
        if channels % 8 or not 8 <= channels <= MAX_CHANNELS:
            raise ValueError(f"{name} must be a multiple of 8 up to {MAX_CHANNELS}, got {channels}")
    if terms not in (1, 3):
        raise ValueError(f"terms must be 1 or 3, got {terms!r}")
    if out.shape[0] != batch or 2 * height - out_height not in (0, 1) or 2 * width - out_width not in (0, 1):
        full = batch, out_channels, 2 * height, 2 * width
        raise ValueError(f"out must have shape {full} or one row or column less, got {tuple(out.shape)}")
    shapes = {"weight": (in_channels, out_channels, 3, 3), "bias": (out_channels,)} | split.shapes(in_channels, out_channels)
    shapes["gy"] = tuple(out.shape)
    arrays = {"packed": packed, "factors": factors, "x_map": x_map, "weight": weight, "bias": bias, "gy": outputs[0]}
    for name, array in arrays.items():
        if array.shape != shapes[name]:
            raise ValueError(f"{name} must have shape {shapes[name]}, got {tuple(array.shape)}")
    for name, array, alignment in (("packed", packed, 16), ("x_map", x_map, 64)):
        if array.data_ptr() % alignment:
            raise ValueError(f"{name} must begin at a multiple of {alignment} bytes, got {array.data_ptr():#x}")
    if reason := too_large(batch, height, width):
        raise ValueError(f"{reason}: x is {tuple(x.shape)}")
    start(x, packed, factors, x_map, weight, bias, outputs, terms, (add_value, scale, min_val, max_val))


def start(x, packed, factors, x_map, weight, bias, outputs, terms, constants):
    """``launch`` of tensors that fit, which is not checked; ``outputs``: (gy, out) or (out,)."""
    (batch, in_channels, height, width), (_, out_channels, out_height, out_width) = x.shape, outputs[-1].shape
    vector = next(v for v in (4, 2, 1) if out_width % v == 0 and not any(t.data_ptr() % (4 * v) for t in outputs))
    if batch:
        config = in_channels, out_channels, terms, vector, tensor_map.fits(x), len(outputs) == 2
        prepared = prepare(config, batch, height, width, out_height, out_width, x.device, multiprocessors(x.device))
        prepared((x, packed, factors, x_map, weight, bias, *outputs), constants=constants)


@functools.lru_cache(maxsize=1024)
def prepare(config, batch, height, width, out_height, out_width, device, multiprocessors):
    """The launch for the fields of a ``Config`` and a size."""
    config = Config(*config)
    strips, units, blocks = grid(batch, height, width, multiprocessors)
    sizes = height, width, out_height, out_width
    return build(config).prepare(device, blocks, units, strips, sizes, shared_bytes=config.shared_bytes)
