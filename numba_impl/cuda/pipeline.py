"""How the warpgroups of a block wait for each other: turns, stages and rings, which a kernel uses by what it means.

Each is a tuple of device functions, made from where its barriers lie while a kernel is built. ``shared`` is the address of the
block's shared memory, an int32. ``start`` is called by one thread, before the block's first syncthreads.
"""

from collections.abc import Callable
from typing import NamedTuple

from numba import int32, int64

from numba_impl.cuda.device import device
from numba_impl.cuda.ptx import barrier
from numba_impl.cuda.shared import Place


@device
def element(shared, place, index):
    """The address of an element of a field's first axis."""
    return shared + place.at + place.step * index


class Turn(NamedTuple):
    """Two warpgroups, 0 and 1, take turns: one at a time runs what stands between ``take`` and ``give``."""

    take: Callable  # (group): wait until the other has given
    give: Callable  # (group): the turn is the other's; at the very first one of them gives without having taken


class Slot(NamedTuple):
    """Which slot it is, and the parity of how often the numbers have gone through all slots."""

    which: int
    phase: int


class Stages(NamedTuple):
    """Slots of memory that the bulk copy engine fills, and that are filled again when a later number has their turn."""

    start: Callable  # (shared)
    slot: Callable  # (number, counted from 0) -> Slot
    expect: Callable  # (shared, slot) -> (address, barrier), for the copy of the slot's bytes that one thread then starts
    wait: Callable  # (shared, slot) -> address, once the copy is there


class Ring(NamedTuple):
    """Slots that some threads fill and others use, before they are filled again when a later number has their turn."""

    start: Callable  # (shared)
    slot: Callable  # (number, counted from 0) -> Slot
    acquire: Callable  # (shared, slot): to fill it, wait until all its uses before are over
    publish: Callable  # (shared, slot): this thread has filled its part
    wait: Callable  # (shared, slot): until all is filled
    release: Callable  # (shared, slot, twice): one of its uses is over, or two are


def turn(barriers, threads) -> Turn:
    """``barriers``: the numbers of two named barriers; ``threads``: of both warpgroups together."""
    first, second = map(int, barriers)

    @device
    def take(group):
        barrier.sync(int32(first + (second - first) * group), threads)

    @device
    def give(group):
        barrier.arrive(int32(second - (second - first) * group), threads)

    return Turn(take, give)


def stages(memory: Place, filled: Place) -> Stages:
    """``memory``: of all slots, one after another; ``filled``: an mbarrier for each."""
    count = filled.size // filled.step
    memory = memory._replace(step=memory.size // count)

    @device
    def start(shared):
        for index in range(count):
            barrier.mbarrier_init(element(shared, filled, index), 1)

    @device
    def expect(shared, slot):
        at = element(shared, filled, slot.which)
        barrier.mbarrier_arrive_expect(at, memory.step)
        return element(shared, memory, slot.which), at

    @device
    def wait(shared, slot):
        barrier.mbarrier_wait(element(shared, filled, slot.which), slot.phase)
        return element(shared, memory, slot.which)

    return Stages(start, _slots(count), expect, wait)


def ring(full: Place, empty: Place, fillers, uses) -> Ring:
    """``full``, ``empty``: an mbarrier for each slot; ``fillers``: threads that fill one; ``uses``: until it is filled again."""
    count = full.size // full.step

    @device
    def start(shared):
        for index in range(count):
            barrier.mbarrier_init(element(shared, full, index), fillers)
            barrier.mbarrier_init(element(shared, empty, index), uses)

    @device
    def acquire(shared, slot):
        """At first at once: the phase before a barrier's first has ended."""
        barrier.mbarrier_wait(element(shared, empty, slot.which), slot.phase ^ 1)

    @device
    def publish(shared, slot):
        barrier.mbarrier_arrive(element(shared, full, slot.which))

    @device
    def wait(shared, slot):
        barrier.mbarrier_wait(element(shared, full, slot.which), slot.phase)

    @device
    def release(shared, slot, twice):
        at = element(shared, empty, slot.which)
        barrier.mbarrier_arrive(at)
        if twice:
            barrier.mbarrier_arrive(at)

    return Ring(start, _slots(count), acquire, publish, wait, release)


def _slots(count):
    """The device function that gives a number's ``Slot``: number % count, by a product, as Numba's own division is long.

    It is exact for numbers below 2^32 / (count - 1).
    """
    inverse = -(-(2**32) // count)

    @device
    def slot(number):
        passes = int32(int64(number) * inverse >> 32)
        return Slot(int32(number - passes * count), int32(passes & 1))

    return slot
