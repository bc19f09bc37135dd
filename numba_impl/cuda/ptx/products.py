"""The matrix products of a warpgroup (wgmma, sm_90a), their fragments, and the registers for their sums.

The functions of a ``Code`` are for primitives that write straight-line code: sums are values there, not memory, so that
they stay in the registers that wgmma adds to.
"""

from numba_impl.cuda.ptx.emit import instruction


def set_registers(count, more):
    """setmaxnreg (sm_90a): a primitive that gives its warpgroup's threads ``count`` registers, ``more`` or fewer than before."""

    @instruction(f"setmaxnreg.{'inc' if more else 'dec'}.sync.aligned.u32 {count};")
    def setmaxnreg():
        """setmaxnreg (sm_90a)."""

    return setmaxnreg


def load_fragment(code, address, offset):
    """ldmatrix.x4 (sm_75): A's fragment, fp16, from a shared address and ``offset`` bytes on, in four registers.

    See ``fragments.loaded_row`` and ``operand``.
    """
    return code.asm(f"ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{$0, $1, $2, $3}}, [$4 + {offset}];", "rrrr", "r", [address])


def fence(code):
    """wgmma.fence: registers and shared memory that were written so far are seen by the products that follow."""
    code.asm("wgmma.fence.sync.aligned;", "", "", [])


def multiply(code, columns, sums, fragment, descriptor):
    """wgmma.mma_async.m64nNk16: D[64, N] (+)= A[64, 16] B[16, N], fp16 in, fp32 out; gives the new sums.

    A in registers (``fragments.operand``), B in shared memory by a descriptor, D in N / 2 registers
    (``fragments.accumulator``). ``sums`` None: the product alone.
    """
    n = columns // 2
    outputs, inputs = (", ".join(f"${i}" for i in r) for r in (range(n), range(2 * n, 2 * n + 4)))
    text = (
        f"{{ .reg .pred p; setp.ne.b32 p, {int(sums is not None)}, 0; wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.f16.f16 "
        f"{{{outputs}}}, {{{inputs}}}, ${2 * n + 4}, p, 1, 1, 0; }}"
    )
    before = [code.undefined("f")] * n if sums is None else sums
    return code.asm(text, "f" * n, [*map(str, range(n)), *"rrrrl"], [*before, *fragment, descriptor])


def commit(code):
    """wgmma.commit_group: the products since the last one are a group."""
    code.asm("wgmma.commit_group.sync.aligned;", "", "", [])


def wait(code, pending):
    """wgmma.wait_group: all groups are done but the last ``pending``."""
    code.asm(f"wgmma.wait_group.sync.aligned {pending};", "", "", [])


def settled(code, sums):
    """The sums, tied to this point, so that none is read before the wait that stands before it."""
    return code.asm("", "f" * len(sums), map(str, range(len(sums))), sums)
