"""Which thread holds which element: the lane and register maps of wgmma and ldmatrix, and of our shared memory.

Plain integer functions, used by the kernel as they stand and tested on the CPU. A matrix product is
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


def pixel(row):
    """The pixel of a strip that is a row of A and D.

    Rows r and r + 8, which one thread keeps, are neighbours: their outputs are 16 bytes in a row of
    the image, and those of eight lanes a line of 128.
    """
    return 16 * (row // 16) + 2 * (row % 8) + row // 8 % 2


def stored_lane(lane):
    """The lane whose sums a lane stores: so that eight neighbours, which access memory at a time, store a line of 128 bytes."""
    return lane % 8 * 4 + lane // 8


def pixel_offset(pixel):
    """Where in a row in shared memory a pixel's [64 channels] fp16 lie, in bytes: even pixels first, then odd ones.

    Of 144 bytes apart, so that neither the eight neighbours written at a time nor the eight every other
    pixel read at a time meet in a bank.
    """
    return pixel // 2 * 144 + pixel % 2 * 4800


def weight_element(channel_in, channel_out, out_channels):
    """Where in a tap's B an element lies, counted in fp16: core matrices of 8 output x 8 input channels."""
    return (channel_in // 8 * out_channels + channel_out) * 8 + channel_in % 8
