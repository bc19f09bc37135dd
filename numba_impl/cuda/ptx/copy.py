"""Copies to shared memory that go on beside the threads: a thread's cp.async, and the bulk copy engine's."""

from numba.cuda import types

from numba_impl.cuda.ptx.emit import element_of, instruction, loaded, operand, primitive, refuse


def _start(shared, to, source, base, offset, count, *keep):
    registers = loaded(element_of(source), count)
    if element_of(shared) != registers.dtype:
        refuse(f"copies between arrays of one dtype, got {shared.dtype} and {source.dtype}")
    if registers.size < 4:
        refuse(f"copies 4, 8 or 16 bytes, got {registers.size}")
    copy = f"cp.async.{'cg' if registers.size == 16 else 'ca'}.shared.global [$0], [$1], {registers.size}"
    text = f"{{ .reg .pred p; setp.eq.b32 p, $2, 0; {copy}, p; }}" if keep else f"{copy};"

    def emit(code, first, to, source_first, base, offset, _, *keep):
        to, base, offset = (code.times(index, registers.dtype.bitwidth // 8) for index in (to, base, offset))
        target = code.add(code.shared_address(code.pointer(shared, first)), code.low(to))
        origin = code.add(code.add(code.address(code.pointer(source, source_first)), base), offset)
        code.asm(text, "", "rl" + "r" * len(keep), [target, origin, *keep])

    to, base, offset = (operand("l", index) for index in (to, base, offset))
    return types.void, (shared, to, source, base, offset, count, *[operand("r", kind) for kind in keep]), emit


@primitive(_start)
def start(shared, to, source, base, offset, count):
    """cp.async (sm_80): ``count`` elements, 4, 8 or 16 bytes, aligned, from ``source[base + offset]`` to ``shared[to]``.

    ``base`` is the same for many copies and kept apart from ``offset``, so that the sum is one instruction.
    """
    for i in range(count):
        shared[to + i] = source[base + offset + i]


@primitive(_start)
def start_or_zero(shared, to, source, base, offset, count, keep):
    """``start``, or zeros where ``keep`` is 0, without an access to ``source``."""
    for i in range(count):
        shared[to + i] = source[base + offset + i] if keep else 0


@instruction("cp.async.wait_all;")
def wait():
    """cp.async.wait_all: what this thread started has arrived (in the simulator it always has)."""


_BULK = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [$0], [$1], $2, [$3];"


@instruction(_BULK, "rlrr")
def bulk(shared, source, size, barrier):
    """cp.async.bulk (sm_90): ``size`` bytes from a global to a shared address, both multiples of 16; ``barrier`` counts them."""


_BOX = "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [$0], [$1, {$2, $3, $4, $5}], [$6];"


@instruction(_BOX, "rlrrrrr")
def box(shared, tensor_map, x, y, z, w, barrier):
    """cp.async.bulk.tensor.4d (sm_90): the box at (x, y, z, w), x innermost, of the tensor that a map describes.

    To a shared address, a multiple of 128; outside of the tensor are zeros, and all are counted by ``barrier``. No coordinate
    may be negative: (-3, -1, 0, 0) was an illegal instruction on an H200.
    """


@instruction("fence.proxy.tensormap::generic.acquire.gpu [$0], 128;", "l")
def tensor_map_fence(tensor_map):
    """fence.proxy.tensormap (sm_90): a map that an earlier kernel wrote is seen by the bulk copy engine."""
