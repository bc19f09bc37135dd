"""Which thread holds which element: the lane and register maps of wgmma and ldmatrix, and of a matrix in shared memory.

Plain integer functions, used by kernels as they stand and tested on the CPU. A matrix product is
D[64, N] += A[64, 16] B[16, N], by a warpgroup of 128 threads. Sources: PTX ISA, "Register Fragments
for wgmma.mma_async.m64nNk16" and "Matrix load: ldmatrix".
"""


def accumulator(thread, register):
    """(row, column) of D that a thread keeps in its fp32 ``register`` (of N / 2)."""
    warp, lane = thread // 32, thread % 32
    row = 16 * warp + lane // 4 + 8 * (register // 2 % 2)
    return row, 8 * (register // 4) + 2 * (lane % 4) + register % 2


def operand(thread, register):
    """(row, first k) of the two neighbours in A that a thread keeps in its ``register`` (of 4)."""
    warp, lane = thread // 32, thread % 32
    return 16 * warp + lane // 4 + 8 * (register % 2), 2 * (lane % 4) + 8 * (register // 2)


def loaded_row(thread):
    """(row, first k) of A whose address a thread gives to ``ldmatrix.x4``, so that it fills ``operand``'s registers."""
    warp, lane = thread // 32, thread % 32
    return 16 * warp + lane % 8 + 8 * (lane // 8 % 2), 8 * (lane // 16)


def matrix_element(k, column, columns):
    """Where in shared memory an element of B [any depth, columns] lies, counted in fp16: core matrices of 8 columns x 8 k."""
    return (k // 8 * columns + column) * 8 + k % 8


def descriptor(columns):
    """What tells wgmma of such a B, but for its address / 16, which is added: no swizzle, and the bytes / 16 from 8 k to the
    next 8 and from 8 columns to the next 8."""
    return columns << 16 | 8 << 32
