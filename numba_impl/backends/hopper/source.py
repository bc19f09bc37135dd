"""Where the producer's threads have rows of x from: stages that the bulk copy engine fills ahead, or global memory."""

from collections.abc import Callable
from typing import NamedTuple

from numba import float32, int32, int64

from numba_impl.backends.hopper.layout import BOX, STRIP, Config
from numba_impl.cuda.device import device, unroll
from numba_impl.cuda.pipeline import Stages
from numba_impl.cuda.ptx import copy, memory


class Walk(NamedTuple):
    """The rows that a block reads, one after another: ``count`` of them, of images of a size, from pixel ``cell`` on."""

    cell: int
    count: int
    height: int
    width: int


class Row(NamedTuple):
    """A row of x, or, as row ``height``, the zeros below an image."""

    image: int
    row: int


class Part(NamedTuple):
    """A thread's part of a row: a pixel and half of the channels; in warp 0 besides two channels a lane of the pixel beside."""

    thread: int
    warp: int
    lane: int
    pixel: int
    half: int


class Source(NamedTuple):
    """Device functions. ``number`` counts rows from the walk's first, ``row`` says which one it is."""

    start: Callable  # (shared, x_map, thread, walk, row) -> the row that the first request is for
    read: Callable  # (values, beside, shared, x, number, row, walk, part): a thread's part, zeros outside of the image
    request: Callable  # (shared, x_map, thread, walk, number, row) -> the next request's, once all have read row ``number``


@device
def following(row, height):
    """The row after one."""
    last = row.row == height
    return Row(int32(row.image + 1) if last else row.image, int32(0) if last else int32(row.row + 1))


def staged(config: Config, stages: Stages) -> Source:
    """From stages [in_channels, BOX]: a thread asks for a row when the one that had its stage has been read."""
    C_IN, COUNT, STAGES = config.in_channels, config.thread_channels, config.stages

    @device
    def ask(shared, x_map, thread, walk, number, row):
        if thread == 0 and number < walk.count:
            at, filled = stages.expect(shared, stages.slot(number))
            copy.box(at, memory.global_address(x_map), walk.cell, row.row, 0, row.image, filled)

    @device
    def start(shared, x_map, thread, walk, row):
        if thread == 0:
            copy.tensor_map_fence(memory.global_address(x_map))
        for number in range(STAGES):
            ask(shared, x_map, thread, walk, number, row)
            row = following(row, walk.height)
        return row

    @device
    def read_value(i, values, at, half):
        values[i] = memory.load_shared_or_zero(at + 4 * BOX * i, float32, C_IN == 2 * COUNT or half * COUNT + i < C_IN)

    read_values = unroll(COUNT, read_value)

    @device
    def read(values, beside, shared, x, number, row, walk, part):
        at = stages.wait(shared, stages.slot(number))
        read_values(values, int32(at + 4 * (part.half * COUNT * BOX + part.pixel)), part.half)
        inside = part.warp == 0 and 2 * part.lane < C_IN
        for j in range(2):
            beside[j] = memory.load_shared_or_zero(at + 4 * ((2 * part.lane + j) * BOX + STRIP), float32, inside)

    @device
    def request(shared, x_map, thread, walk, number, row):
        ask(shared, x_map, thread, walk, number + STAGES, row)
        return following(row, walk.height)

    return Source(start, read, request)


def direct(config: Config) -> Source:
    """From global memory: no one asks ahead."""
    C_IN, COUNT = config.in_channels, config.thread_channels

    @device
    def start(shared, x_map, thread, walk, row):
        return row

    @device
    def load_value(i, values, at, plane, half, inside):
        keep = inside if C_IN == 2 * COUNT else inside and half * COUNT + i < C_IN
        values[i] = memory.load_global_or_zero(at + i * plane, float32, keep)

    load_values = unroll(COUNT, load_value)

    @device
    def read(values, beside, shared, x, number, row, walk, part):
        plane = int64(walk.height) * walk.width * 4
        at = memory.global_address(x) + row.image * C_IN * plane + (int64(row.row) * walk.width + walk.cell) * 4
        inside = row.row < walk.height and walk.cell + part.pixel < walk.width
        load_values(values, at + part.half * COUNT * plane + part.pixel * 4, plane, part.half, inside)
        inside = part.warp == 0 and row.row < walk.height and walk.cell + STRIP < walk.width and 2 * part.lane < C_IN
        for j in range(2):
            beside[j] = memory.load_global_or_zero(at + (2 * part.lane + j) * plane + STRIP * 4, float32, inside)

    @device
    def request(shared, x_map, thread, walk, number, row):
        return row

    return Source(start, read, request)
