"""A consumer: one of two warpgroups that take a block's units in turn. While one multiplies, the other does all else."""

from typing import NamedTuple

from numba import cuda, float32, int32

from numba_impl.backends.hopper import exact
from numba_impl.backends.hopper import finish as finishes
from numba_impl.backends.hopper.layout import GROUP, STRIP, Config, Named, pixel, pixel_offset
from numba_impl.backends.hopper.products import products
from numba_impl.backends.hopper.scaling import NONE, undoing_both
from numba_impl.backends.hopper.schedule import PARITIES, schedule
from numba_impl.cuda import pipeline
from numba_impl.cuda.device import device
from numba_impl.cuda.fragments import descriptor, loaded_row
from numba_impl.cuda.pipeline import Ring, Stages, element
from numba_impl.cuda.ptx import maths, memory
from numba_impl.cuda.ptx.products import set_registers

REGISTERS = 208

row_loaded, pixel_of, offset_of_pixel = map(device, (loaded_row, pixel, pixel_offset))
more_registers = set_registers(REGISTERS, more=True)


class Unit(NamedTuple):
    """A row of cells, and the number in the ring of its own row of x; the next number is the row below."""

    image: int
    row: int
    number: int


def build(config: Config, epilogue, ring: Ring, weights: Stages):
    """A device function of (shared, x, weight, bias, gy, out, thread, consumer, run, sizes, constants)."""
    AT, C_OUT, SUMS = config.shared.places, config.out_channels, config.out_channels // 2
    MATRIX = descriptor(C_OUT)
    turn = pipeline.turn((Named.FIRST, Named.SECOND), 2 * GROUP)
    load_fragments, multiply, settle = products(schedule(config), C_OUT)
    finish = finishes.build(config, epilogue)
    compute_exactly = exact.build(config.in_channels, C_OUT, STRIP, GROUP, config.terms == 1, config.operation, epilogue)

    @device
    def later(unit, units, height):
        image, row, number = unit.image, int32(unit.row + units), int32(unit.number + units)
        while row >= height:
            image, row, number = int32(image + 1), int32(row - height), int32(number + 1)
        return Unit(image, row, number)

    @device
    def undoing(shared, slot):
        return memory.load_shared(element(shared, AT.scales, slot.which), float32)

    @device
    def matrices(shared):
        """The weights' descriptor, twice: if the compiler knew that, it would keep 36 sums with it in registers all the time."""
        at = shared + AT.descriptor.at
        return memory.load_shared_anew(at, int32) | MATRIX, memory.load_shared_anew(at, int32) | MATRIX

    @device
    def consume(shared, x, weight, bias, gy, out, thread, consumer, run, sizes, constants):
        more_registers()
        sums = cuda.local.array((PARITIES, SUMS), float32)
        height = sizes[0]
        # Where it points ldmatrix, in a row of the ring, for x and for x shifted by a pixel.
        row, channel = row_loaded(thread)
        own = int32(shared + AT.ring.at + offset_of_pixel(pixel_of(row)) + 2 * channel)
        beside = int32(shared + AT.ring.at + offset_of_pixel(pixel_of(row) + 1) + 2 * channel)
        seat = finish.seat(shared, thread, run.cell, out, sizes)
        image = maths.divide(run.first, height)
        unit, units = Unit(image, int32(run.first - image * height), int32(0)), consumer
        if consumer == 1:
            turn.give(consumer)
        weights.wait(shared, weights.slot(0))
        for _ in range(int32(run.first + consumer), run.last, int32(2)):
            unit, units = later(unit, units, height), int32(2)
            slot, below = ring.slot(unit.number), ring.slot(unit.number + 1)
            ring.wait(shared, slot)
            ring.wait(shared, below)
            undo = undoing_both(undoing(shared, slot), undoing(shared, below))
            at, at_below = int32(AT.ring.step * slot.which), int32(AT.ring.step * below.which)
            rows, descriptors = (own + at, beside + at, own + at_below, beside + at_below), matrices(shared)
            fragments = load_fragments(rows)
            turn.take(consumer)
            pending = multiply(fragments, rows, descriptors)
            turn.give(consumer)
            settle(sums, pending)
            if thread & 31 == 0:  # for its warp
                # A row has two uses: by its own unit and by the one above. Where one of them is missing, the other counts twice.
                ring.release(shared, slot, unit.number == 0 or unit.row == 0)
                ring.release(shared, below, unit.row == height - 1)
            if undo != NONE:
                finish.store(sums, undo, unit.image, unit.row, seat, gy, out, sizes, constants)
            else:
                # Sizes from shared memory, so that what follows from them is not kept in registers all the time.
                same = memory.load_shared(shared + AT.sizes.at, int32, 4)
                compute_exactly(thread, x, weight, bias, gy, out, unit.image, unit.row, run.cell, same, constants)

    return consume
