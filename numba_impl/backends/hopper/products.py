"""The matrix products of a warpgroup, one after another, in straight-line code written while the kernel is compiled.

Sums are values here, not memory, so that they stay in the registers that wgmma adds to.
"""

from collections.abc import Callable
from typing import NamedTuple

from numba.cuda import types

from numba_impl.cuda.ptx import products as wgmma
from numba_impl.cuda.ptx.emit import primitive

AHEAD = 2  # steps by which fragments are loaded ahead, as a load waits for the products issued before it


class Products(NamedTuple):
    """Primitives for one list of steps, in the order in which a warpgroup calls them.

    Others may use the tensor cores before ``multiply`` and from its end on: there two warpgroups take turns.
    """

    load: Callable  # (bases) -> the first steps' fragments
    multiply: Callable  # (fragments, bases, weights) -> sums, which are being computed
    finish: Callable  # (memory, sums): once they are computed, into memory [tiles, columns / 2] of the thread


def products(steps, columns) -> Products:
    """``steps``: a list of (loads, products). A load (base, offset) is a fragment by ldmatrix from address
    ``bases[base] + offset``. A product (tile, load, descriptor, offset) is one wgmma: into that tile of the sums,
    from that fragment of its step, by the matrix whose descriptor is ``weights[descriptor] + offset``; the first into a
    tile overwrites it.
    """
    tiles = sorted({product[0] for _, products in steps for product in products})
    sums_of_tile = columns // 2

    def loaded(code, addresses, number):
        loads = steps[number][0] if number < len(steps) else ()
        return [wgmma.load_fragment(code, addresses[base], offset) for base, offset in loads]

    def describe_load(bases):
        def emit(code, bases):
            addresses = code.unpack(bases)
            return [r for number in range(AHEAD) for fragment in loaded(code, addresses, number) for r in fragment]

        count = 4 * sum(len(loads) for loads, _ in steps[:AHEAD])
        return types.UniTuple(types.int32, count), (types.UniTuple(types.int32, len(bases)),), emit

    @primitive(describe_load)
    def load(bases):
        """ldmatrix of what the first steps need."""

    def describe_multiply(fragments, bases, weights):
        def emit(code, registers, bases, weights):
            registers, addresses, descriptors = map(code.unpack, (registers, bases, weights))
            ahead = [[[registers.pop(0) for _ in range(4)] for _ in loads] for loads, _ in steps[:AHEAD]]
            sums = {}
            for number, (_, products) in enumerate(steps):
                fragments = ahead.pop(0)
                wgmma.fence(code)
                for tile, fragment, which, offset in products:
                    descriptor = code.add(descriptors[which], offset)
                    sums[tile] = wgmma.multiply(code, columns, sums.get(tile), fragments[fragment], descriptor)
                wgmma.commit(code)
                if number < len(steps) - 1:
                    wgmma.wait(code, 1)
                ahead.append(loaded(code, addresses, number + AHEAD))
            return [value for tile in tiles for value in sums[tile]]

        addresses, descriptors = types.UniTuple(types.int32, len(bases)), types.UniTuple(types.int64, len(weights))
        return types.UniTuple(types.float32, len(tiles) * sums_of_tile), (fragments, addresses, descriptors), emit

    @primitive(describe_multiply)
    def multiply(fragments, bases, weights):
        """wgmma for every product, two groups in flight."""

    def describe_finish(memory, sums):
        def emit(code, array, sums):
            wgmma.wait(code, 0)
            values = code.unpack(sums)
            for tile in tiles:
                own, values = values[:sums_of_tile], values[sums_of_tile:]
                for i, value in enumerate(wgmma.settled(code, own)):
                    code.store(code.pointer(memory, array, code.constant("l", tile * sums_of_tile + i)), [value])

        return types.void, (memory, sums), emit

    @primitive(describe_finish)
    def finish(memory, sums):
        """wgmma.wait_group, after which the sums can be read."""

    return Products(load, multiply, finish)
