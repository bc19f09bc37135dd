"""What the kernel is compiled for, how its blocks share the work, and what lies where in their shared memory."""

from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from numba_impl.cuda.shared import BARRIER, Field, Layout
from numba_impl.problem import Geometry

GEOMETRY = Geometry.of(3, 2, 1)  # with any output padding
MAX_CHANNELS = 64
STRIP = 64  # cells of a unit
BOX = STRIP + 4  # pixels of a row that the bulk copy engine loads: the strip and the one beside it, in multiples of 16 bytes
GROUP = 128  # threads of a warpgroup: the producer's or a consumer's
THREADS = 3 * GROUP
WARPS = GROUP // 32
ALL_LANES = 0xFFFFFFFF


class Named(IntEnum):
    """The block's named barriers; 0 is that of syncthreads."""

    PRODUCER = 1
    FIRST = 2  # the turn of one consumer
    SECOND = 3  # and of the other


def pixel(row):
    """The pixel of a strip that is a row of the products' A and D.

    Rows r and r + 8, which one thread keeps, are neighbours: their outputs are 16 bytes in a row of
    the image, and those of eight lanes a line of 128.
    """
    return 16 * (row // 16) + 2 * (row % 8) + row // 8 % 2


def stored_lane(lane):
    """The lane whose sums a lane stores: so that eight neighbours, which access memory at a time, store a line of 128 bytes."""
    return lane % 8 * 4 + lane // 8


def pixel_offset(pixel):
    """Where in a row in shared memory a pixel's [64 channels] fp16 begin, in bytes: even pixels first, then odd ones.

    They are 144 bytes apart, so that neither the eight neighbours written at a time nor the eight every other
    pixel read at a time meet in a bank.
    """
    return pixel // 2 * 144 + pixel % 2 * 4800


PLANE = pixel_offset(STRIP - 1) + 144  # bytes of a row's hi or lo: its pixels and the one beside


@dataclass(frozen=True)
class Config:
    """What a kernel is compiled for.

    ``in_channels``, ``out_channels``: multiples of 8. ``terms``: 3 for fp32 accuracy, 1 for TF32's. ``vector``: how many fp32
    at the start of a row of outputs are one aligned access, 4, 2 or 1. ``bulk``: the bulk copy engine loads x, whose rows are
    multiples of 16 bytes. ``operation``: "forward" or "pre_gradient".
    """

    in_channels: int
    out_channels: int
    terms: int
    vector: int
    bulk: bool = True
    operation: str = "forward"

    @property
    def steps(self) -> int:
        """Products along the input channels, of 16 each."""
        return -(-self.in_channels // 16)

    @property
    def thread_channels(self) -> int:
        """Input channels of a pixel that one thread of the producer reads: half of them, padded to whole steps."""
        return 8 * self.steps

    @property
    def halves(self) -> int:
        """Parts of x and of w in shared memory: hi, and with three terms lo."""
        return 2 if self.terms == 3 else 1

    @property
    def slots(self) -> int:
        """Rows of the ring: two that are multiplied, and what else there is room for."""
        return 3 if self.terms == 3 else 4

    @property
    def stages(self) -> int:
        """Rows of x as they are, that the bulk copy engine loads ahead."""
        return 1 if self.terms == 3 else 2

    @property
    def shared(self) -> Layout:
        """The shared memory of a block."""
        return Layout(
            # fp16 hi, and lo; for each tap core matrices of 8 output x 8 input channels
            Field("weights", (self.halves, GEOMETRY.taps, 2 * self.steps, self.out_channels, 8), np.float16),
            # rows of x as they are
            Field("stages", (self.stages, self.in_channels, BOX), np.float32, align=128),
            # rows of x as fp16 hi, and lo; of pixels, where ``pixel_offset`` says, [64 channels]
            Field("ring", (self.slots, self.halves, PLANE), np.uint8, align=16),
            # factor, bias
            Field("channels", (self.out_channels, 2), np.float32, align=8),
            # of a row and of the next one: bits of a pixel's largest |x|, [2 halves of the channels, STRIP]; of the one beside
            Field("maxima", (2, 2 * STRIP + 4), np.int32, align=16),
            # height, width, out_height, out_width
            Field("sizes", (4,), np.int32, align=16),
            # what undoes a row's scale, or ``scaling.ANY`` or ``NONE``
            Field("scales", (self.slots,), np.float32),
            # barriers: the row in the slot is there; it has been used
            Field("full", (self.slots,), BARRIER),
            Field("empty", (self.slots,), BARRIER),
            # the row in the stage is there
            Field("staged", (self.stages,), BARRIER),
            # the weights are there
            Field("loaded", (1,), BARRIER),
            # low half of the weights' descriptor
            Field("descriptor", (1,), np.int32),
        )


def grid(batch, height, width, multiprocessors):
    """(strips of an image, units of a strip, blocks to launch)."""
    strips, units = -(-width // STRIP), batch * height
    return strips, units, strips * min(units, max(1, multiprocessors // strips))


def too_large(batch, height, width) -> str:
    """Why the kernel's 32-bit numbers do not hold a size; empty if they do."""
    if batch * (height + 1) >= 2**31 or width >= 2**29:
        return "a batch of rows, or a row, is too long for its 32-bit counters"
    return ""
