"""The matrix products of a warpgroup, one after another, in straight-line code written while the kernel is compiled.

Sums are values here, not memory, so that they stay in the registers that wgmma adds to.
"""

from llvmlite import ir
from numba.cuda import cgutils, types
from numba.cuda.extending import intrinsic

from numba_impl.cuda import ptx


def products(steps, columns):
    """A primitive ``(sums, bases, weights, turn, next_turn)``: matrix products of a warpgroup, ``steps`` after one another.

    ``steps``: a list of (loads, multiplications). A load (base, offset) is a fragment by ldmatrix from address
    ``bases[base] + offset``. A multiplication (tile, load, descriptor, offset) is one wgmma: into that tile of
    ``sums`` [tiles, columns / 2], from that fragment of its step, by the matrix whose descriptor is
    ``weights[descriptor] + offset``. The first into a tile overwrites it. Fragments are loaded two steps ahead: a
    load waits for the products issued before it. At the end all is done.

    Two warpgroups take turns, so that one multiplies while the other does all else: named barrier
    ``turn`` is waited for once the first fragments are on their way, ``next_turn`` is arrived at once the last
    product is.
    """

    def typer(typingctx, sums, bases, weights, turn, next_turn):
        def codegen(context, builder, sig, args):
            array = ptx.data(context, builder, sig.args[0], args[0])
            addresses, descriptors = (cgutils.unpack_tuple(builder, arg) for arg in args[1:3])
            tiles = {}

            def control(text, *operands):
                ptx.asm(builder, ir.VoidType(), text, "r," * len(operands) + "~{memory}", operands)

            def load(number):
                loads = steps[number][0] if number < len(steps) else ()
                return [ptx.emit_fragment(builder, addresses[base], offset) for base, offset in loads]

            loaded = [load(0), load(1)]
            control("bar.sync $0, 256;", args[3])
            for number, (_, multiplications) in enumerate(steps):
                fragments = loaded.pop(0)
                control("wgmma.fence.sync.aligned;")
                for tile, fragment, which, offset in multiplications:
                    before = tiles.get(tile) or [ir.Constant(ptx.F32, ir.Undefined)] * (columns // 2)
                    descriptor = builder.add(descriptors[which], ptx.I64(offset))
                    tiles[tile] = ptx.emit_wgmma(builder, columns, before, fragments[fragment], descriptor, tile in tiles)
                control("wgmma.commit_group.sync.aligned;")
                if number < len(steps) - 1:
                    control("wgmma.wait_group.sync.aligned 1;")
                loaded.append(load(number + 2))
            control("bar.arrive $0, 256;", args[4])
            control("wgmma.wait_group.sync.aligned 0;")
            for tile, values in tiles.items():
                for i, value in enumerate(_settled(builder, values)):
                    builder.store(value, builder.gep(array, [ptx.I64(tile * columns // 2 + i)]))
            return context.get_dummy_value()

        addresses, descriptors = types.UniTuple(types.int32, len(bases)), types.UniTuple(types.int64, len(weights))
        return types.void(sums, addresses, descriptors, types.int32, types.int32), codegen

    return intrinsic(typer)


def _settled(builder, sums):
    """The sums, tied to this point, so that none is read before the wait."""
    kind, n = ir.LiteralStructType([ptx.F32] * len(sums)), len(sums)
    constraints = ",".join(["=f"] * n + [str(i) for i in range(n)] + ["~{memory}"])
    return cgutils.unpack_tuple(builder, ptx.asm(builder, kind, "", constraints, sums), n)
