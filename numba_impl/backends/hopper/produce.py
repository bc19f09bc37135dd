"""The producer: a warpgroup that reads rows of x, chooses their scales, splits them, and puts them into the ring."""

from numba import cuda, float32, int32

from numba_impl.backends.hopper import source as sources
from numba_impl.backends.hopper.layout import GROUP, PLANE, STRIP, Config, Named, pixel_offset
from numba_impl.backends.hopper.scaling import FIRST, INFINITE, NONE, choose, power, undoing
from numba_impl.backends.hopper.source import Part, Row, Walk, following
from numba_impl.cuda.device import device, unroll
from numba_impl.cuda.pipeline import Ring, Stages, element
from numba_impl.cuda.ptx import barrier, maths, memory
from numba_impl.cuda.ptx.products import set_registers

REGISTERS = 88
PRODUCER = int(Named.PRODUCER)
BESIDE = pixel_offset(STRIP)

offset_of_pixel = device(pixel_offset)
fewer_registers = set_registers(REGISTERS, more=False)


def build(config: Config, ring: Ring, stages: Stages):
    """A device function of (shared, x, x_map, thread, run, sizes)."""
    AT, C_OUT, STEPS, COUNT = config.shared.places, config.out_channels, config.steps, config.thread_channels
    SPLIT = config.terms == 3
    source = sources.staged(config, stages) if config.bulk else sources.direct(config)

    @device
    def measure(i, values, largest):
        for j in range(4):
            largest[j] = maths.maximum(largest[j], abs(values[4 * i + j]))

    measure_all = unroll(COUNT // 4, measure)

    @device
    def nonzero(bits):
        return bits if bits > 0 else int32(INFINITE)

    @device
    def extent(values, beside, shared, number, part):
        """(largest, smallest) over the row's pixels of a pixel's largest |x|, as bits; zero pixels do not count below."""
        maxima = element(shared, AT.maxima, number & 1)
        largest = cuda.local.array(4, float32)
        for j in range(4):
            largest[j] = float32(0)
        measure_all(values, largest)
        own = maths.maximum(maths.maximum(largest[0], largest[1]), maths.maximum(largest[2], largest[3]))
        memory.store_shared(maxima + 4 * part.thread, float32, own)
        if part.warp == 0:
            edge = maths.warp_max(maths.bits(maths.maximum(abs(beside[0]), abs(beside[1]))))
            memory.store_shared(maxima + 8 * STRIP, int32, edge)
        barrier.sync(PRODUCER, GROUP)
        a0, a1 = memory.load_shared(maxima + 8 * part.lane, int32, 2)
        b0, b1 = memory.load_shared(maxima + 8 * part.lane + 4 * STRIP, int32, 2)
        edge = memory.load_shared(maxima + 8 * STRIP, int32)
        a0, a1 = max(a0, b0), max(a1, b1)
        low = min(min(nonzero(a0), nonzero(a1)), nonzero(edge))
        return maths.warp_max(max(max(a0, a1), edge)), maths.warp_min(low)

    @device
    def store_chunk(i, values, scale, at):
        """Eight channels."""
        hi, lo = cuda.local.array(4, int32), cuda.local.array(4, int32)
        for j in range(4):
            a, b = values[8 * i + 2 * j] * scale, values[8 * i + 2 * j + 1] * scale
            if SPLIT:
                hi[j], lo[j] = maths.split_half2(a, b)
            else:
                hi[j] = maths.half2(a, b)
        memory.store_shared(at + 16 * i, int32, (hi[0], hi[1], hi[2], hi[3]))
        if SPLIT:
            memory.store_shared(at + 16 * i + PLANE, int32, (lo[0], lo[1], lo[2], lo[3]))

    store_chunks = unroll(STEPS, store_chunk)

    @device
    def store_row(values, beside, scale, shared, slot, part):
        """Scaled and split, to a slot of the ring."""
        row = element(shared, AT.ring, slot.which)
        store_chunks(values, scale, int32(row + offset_of_pixel(part.pixel) + part.half * 16 * STEPS))
        if part.warp == 0 and part.lane < 8 * STEPS:
            at = int32(row + BESIDE + 4 * part.lane)
            hi, lo = maths.split_half2(beside[0] * scale, beside[1] * scale)
            memory.store_shared(at, int32, hi)
            if SPLIT:
                memory.store_shared(at + PLANE, int32, lo)

    @device
    def weights_fit(shared):
        """Whether every output channel's weights have a scale."""
        fit = True
        for channel in range(C_OUT):
            factor, _ = memory.load_shared(element(shared, AT.channels, channel), float32, 2)
            fit = fit and factor != 0
        return fit

    @device
    def produce(shared, x, x_map, thread, run, sizes):
        fewer_registers()
        values, beside = cuda.local.array(COUNT, float32), cuda.local.array(2, float32)
        part = Part(thread, int32(thread // 32), int32(thread % 32), int32(thread % STRIP), int32(thread // STRIP))
        height, width, _, _ = sizes
        image = maths.divide(run.first, height)
        row = Row(image, int32(run.first - image * height))
        # One row more than units of an image: the row below the last unit's.
        rows = int32(run.last - run.first + maths.divide(run.last - 1, height) - image + 1)
        walk = Walk(run.cell, rows, height, width)
        fit = weights_fit(shared)
        shift = int32(FIRST)
        asked = source.start(shared, x_map, thread, walk, row)
        for number in range(walk.count):
            source.read(values, beside, shared, x, number, row, walk, part)
            high, low = extent(values, beside, shared, number, part)  # all threads have read the row when it returns
            asked = source.request(shared, x_map, thread, walk, number, asked)
            shift = int32(choose(shift, high, low))
            slot = ring.slot(number)
            ring.acquire(shared, slot)
            store_row(values, beside, power(shift), shared, slot, part)
            if thread == 0:
                undo = undoing(shift, high, low) if fit else NONE
                memory.store_shared(element(shared, AT.scales, slot.which), float32, undo)
            ring.publish(shared, slot)
            row = following(row, height)

    return produce
