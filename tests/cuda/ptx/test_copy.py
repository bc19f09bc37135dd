"""``ptx.copy``: each primitive in kernels, its exact instruction (compiled, without a GPU), and what it does (GPU, and the
simulator for those of a thread)."""

import math

import pytest
import torch
from numba import cuda, float32, int32
from numba.cuda import types
from torch.nn import functional as F

from numba_impl.cuda import tensor_map
from numba_impl.cuda.ptx import barrier, copy, memory
from tests.cases import SENTINEL
from tests.cuda.intrinsics import (
    DTYPES,
    FLOATS,
    INTS,
    LONGS,
    THREADS,
    check_instructions,
    drawn,
    on_both,
    on_hopper,
    registry,
    start,
)

KERNELS, kernel = registry()

# A thread's copies, of all sizes. Elements change places, so that none is right by having stayed where it was.


def build_copies(dtype, count):
    """The kernels of ``start`` and of ``start_or_zero``: y = x[base + offset ...], ``count`` elements a thread, in reverse."""
    size = count * dtype.bitwidth // 8
    copied = f"cp.async.{'cg' if size == 16 else 'ca'}.shared.global [%], [%], {size}"
    pointer, settings = types.CPointer(dtype), {"label": f"{dtype} {count}", "shared_bytes": THREADS * size}

    @kernel([f"{copied};", "cp.async.wait_all;"], pointer, INTS, pointer, types.int64, **settings)
    def copied_all(x, offsets, y, base):
        shared = cuda.shared.array(0, dtype)
        i = int32(cuda.threadIdx.x)
        copy.start(shared, count * (THREADS - 1 - i), x, base, offsets[i], count)
        copy.wait()
        cuda.syncthreads()
        for j in range(count):
            y[count * i + j] = shared[count * i + j]

    @kernel([f"{copied}, p;", "cp.async.wait_all;"], pointer, INTS, INTS, pointer, types.int64, **settings)
    def copied_or_zero(x, offsets, keep, y, base):
        shared = cuda.shared.array(0, dtype)
        i = int32(cuda.threadIdx.x)
        for j in range(count):
            shared[count * i + j] = x[0]
        cuda.syncthreads()
        copy.start_or_zero(shared, count * (THREADS - 1 - i), x, base, offsets[i], count, keep[i] != 0)
        copy.wait()
        cuda.syncthreads()
        for j in range(count):
            y[count * i + j] = shared[count * i + j]

    return copied_all, copied_or_zero


SIZES = [(dtype, count) for dtype in DTYPES for count in (1, 2, 4, 8) if count * dtype.bitwidth in (32, 64, 128)]
COPIES = {size: build_copies(*size) for size in SIZES}
of_every_size = pytest.mark.parametrize(("dtype", "count"), SIZES, ids=lambda value: str(value))


def draw_copies(dtype, count, device):
    """(x, offsets, y, base, x[base + offset ...] [THREADS, count] in reverse)."""
    x, base = drawn(DTYPES[dtype], 1000 * count, device=device), 400 * count
    offsets = count * torch.randint(-400, 600, (THREADS,), dtype=torch.int32, device=device)
    y = torch.full((THREADS * count,), SENTINEL, device=device).to(x.dtype)
    places = base + offsets[:, None] + torch.arange(count, device=device)
    return x, offsets, y, base, x[places].flip(0)


@on_both
@of_every_size
def test_start(dtype, count, kernel_device):
    x, offsets, y, base, want = draw_copies(dtype, count, kernel_device)
    start(COPIES[dtype, count][0], x, offsets, y, numbers=(base,))
    assert torch.equal(y, want.flatten())


@on_both
@of_every_size
def test_start_or_zero(dtype, count, kernel_device):
    x, offsets, y, base, want = draw_copies(dtype, count, kernel_device)
    keep = torch.arange(THREADS, dtype=torch.int32, device=kernel_device) % 3
    want[keep.flip(0) == 0] = 0
    offsets[keep == 0] = 2**31 - count  # nothing is read
    start(COPIES[dtype, count][1], x, offsets, keep, y, numbers=(base,))
    assert torch.equal(y, want.flatten())


# The bulk copy engine's.

ROUNDS = 4


@kernel(
    [
        "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%], %;",
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%], [%], %, [%];",
    ],
    *(FLOATS, FLOATS, types.int32),
    shared_bytes=ROUNDS * 16 * THREADS + 8,
)
def bulk_copies(x, y, rounds):
    """A round, two copies: the last quarter of 4 * THREADS values to the front, the first three behind it."""
    shared = cuda.shared.array(0, float32)
    i, base = int32(cuda.threadIdx.x), memory.shared_address(shared)
    size, quarter = 16 * THREADS, 4 * THREADS
    arrived = base + rounds * size
    if i == 0:
        barrier.mbarrier_init(arrived, 1)
        barrier.mbarrier_init_fence()
    cuda.syncthreads()
    for r in range(rounds):
        if i == 0:
            to, source = base + r * size, memory.global_address(x) + r * size
            barrier.mbarrier_arrive_expect(arrived, size)
            copy.bulk(to, source + 3 * quarter, quarter, arrived)
            copy.bulk(to + quarter, source, 3 * quarter, arrived)
        barrier.mbarrier_wait(arrived, r & 1)
        for j in range(4):
            e = (4 * r + j) * THREADS
            y[e + i] = shared[e + i]
        cuda.syncthreads()  # no phase may end before all have seen the one before it


@on_hopper
def test_bulk():
    x = torch.randn(ROUNDS, 4, THREADS, device="cuda")
    y = torch.zeros_like(x)
    start(bulk_copies, x, y, numbers=(ROUNDS,))
    assert torch.equal(y, x.roll(1, 1))


BOX = 8, 3, 4, 1  # width, height, channels, images
VALUES = math.prod(BOX)


@kernel(
    [
        "fence.proxy.tensormap::generic.acquire.gpu [%], 128;",
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%], [%, {%, %, %, %}], [%];",
    ],
    *(LONGS, INTS, FLOATS, types.int32),
    shared_bytes=4 * VALUES + 8,
)
def boxes_copied(tensor_map, corners, y, boxes):
    """A box of the tensor at each of the corners [boxes, 4], one after another."""
    shared = cuda.shared.array(0, float32)
    i, base = int32(cuda.threadIdx.x), memory.shared_address(shared)
    arrived = base + 4 * VALUES
    if i == 0:
        barrier.mbarrier_init(arrived, 1)
        barrier.mbarrier_init_fence()
        copy.tensor_map_fence(memory.global_address(tensor_map))
    cuda.syncthreads()
    for box in range(boxes):
        if i == 0:
            barrier.mbarrier_arrive_expect(arrived, 4 * VALUES)
            at = 4 * box
            x, y_, z, w = corners[at], corners[at + 1], corners[at + 2], corners[at + 3]
            copy.box(base, memory.global_address(tensor_map), x, y_, z, w, arrived)
        barrier.mbarrier_wait(arrived, box & 1)
        if i < VALUES:
            y[VALUES * box + i] = shared[i]
        cuda.syncthreads()


CORNERS = {
    "inside": [(0, 0, 0, 0), (4, 2, 0, 1)],
    "over an edge": [(8, 3, 0, 1), (4, 4, 0, 0)],
    "outside": [(12, 0, 0, 0), (0, 5, 0, 1)],
    "beyond channels or images": [(0, 0, 2, 0), (0, 0, 0, 2)],
}


@on_hopper
@pytest.mark.parametrize("corners", CORNERS.values(), ids=CORNERS)
def test_box(corners):
    """Whatever is outside is zero."""
    x = torch.randn(2, 4, 5, 12, device="cuda")
    y = torch.full((len(corners), *reversed(BOX)), float("nan"), device="cuda")
    words = torch.tensor(tensor_map.encode(x.data_ptr(), tuple(x.shape), BOX), device="cuda")
    start(boxes_copied, words, torch.tensor(corners, dtype=torch.int32, device="cuda"), y, numbers=(len(corners),))
    padded = F.pad(x, (8, 8, 8, 8, 8, 8, 8, 8))
    for box, corner in zip(y, corners):
        place = tuple(slice(8 + at, 8 + at + size) for at, size in zip(reversed(corner), reversed(BOX)))
        assert torch.equal(box, padded[place]), corner


@pytest.mark.parametrize("name", KERNELS)
def test_instructions(name, compiler):
    check_instructions(*KERNELS[name])
