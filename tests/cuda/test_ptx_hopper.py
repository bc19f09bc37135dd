"""Every primitive of ``ptx`` and ``products`` that the Hopper kernel alone uses, in a kernel of its own: its exact
instruction (compiled, without a GPU), and what it does, against what its docstring says (GPU)."""

import pytest
import torch
from numba import cuda, float32, int32
from numba.cuda import types
from torch.nn import functional as F

from numba_impl.cuda import ptx, tensor_map
from numba_impl.cuda.device import device, unroll
from numba_impl.cuda.kernel import Kernel
from tests.cases import SENTINEL
from tests.cuda.intrinsics import (
    FLOATS,
    INTS,
    LONGS,
    THREADS,
    check_instructions,
    on_hopper,
    registry,
    results,
    unary,
)

OUTSIDE = 2**46  # bytes past an array: an access there fails

KERNELS, kernel = registry()


# Addresses in global memory.


@kernel([], FLOATS, LONGS)
def global_address(x, y):
    if cuda.threadIdx.x == 0:
        y[0] = ptx.global_address(x)


@kernel(["mov.f32 %, 0f00000000; @p ld.global.nc.f32 %, [%];"], FLOATS, LONGS, INTS, FLOATS)
def load_or_zero(x, offsets, keep, y):
    i = int32(cuda.threadIdx.x)
    y[i] = ptx.load_or_zero(ptx.global_address(x) + offsets[i], keep[i])


@kernel(["@p st.global.cs.v4.f32 [%], {%, %, %, %};"], FLOATS, INTS, FLOATS)
def stream4(x, keep, y):
    i = int32(cuda.threadIdx.x)
    at = 4 * i
    ptx.stream4(ptx.global_address(y) + 4 * at, x[at], x[at + 1], x[at + 2], x[at + 3], keep[i])


@kernel(["@p st.global.cs.v2.f32 [%], {%, %};"], FLOATS, INTS, FLOATS)
def stream2(x, keep, y):
    i = int32(cuda.threadIdx.x)
    ptx.stream2(ptx.global_address(y) + 8 * i, x[2 * i], x[2 * i + 1], keep[i])


@kernel(["@p st.global.cs.f32 [%], {%};"], FLOATS, INTS, FLOATS)
def stream(x, keep, y):
    i = int32(cuda.threadIdx.x)
    ptx.stream(ptx.global_address(y) + 4 * i, x[i], keep[i])


def drawn_keep():
    """An int32 a thread, zero for one in four."""
    values = torch.tensor([0, 1, 2, -1], dtype=torch.int32, device="cuda").repeat(THREADS // 4)
    return values[torch.randperm(THREADS, device="cuda")]


@on_hopper
def test_global_address():
    x = torch.randn(5, device="cuda")[1:]
    y = torch.zeros(1, dtype=torch.int64, device="cuda")
    global_address(1, x, y)
    assert y.item() == x.data_ptr()


@on_hopper
def test_load_or_zero():
    x, keep = torch.randn(1000, device="cuda"), drawn_keep()
    places = torch.randint(1000, (THREADS,), device="cuda")
    y = torch.full((THREADS,), float("nan"), device="cuda")
    load_or_zero(1, x, torch.where(keep != 0, 4 * places, OUTSIDE), keep, y)
    assert torch.equal(y, torch.where(keep != 0, x[places], 0.0))


@on_hopper
@pytest.mark.parametrize(("kernel", "count"), [(stream4, 4), (stream2, 2), (stream, 1)], ids=["stream4", "stream2", "stream"])
def test_streams(kernel, count):
    x, keep = torch.randn(THREADS, count, device="cuda"), drawn_keep()
    y = torch.full_like(x, SENTINEL)
    kernel(1, x, keep, y)
    assert torch.equal(y, torch.where(keep[:, None] != 0, x, SENTINEL))


# Shared memory by address. The other side of each access is Numba's own, and another thread's.


@kernel(["cvta.to.shared.u64 t, %; cvt.u32.u64 %, t;"], FLOATS, FLOATS)
def shared_address(x, y):
    first, second = cuda.shared.array(THREADS, float32), cuda.shared.array(THREADS, float32)
    i = int32(cuda.threadIdx.x)
    first[i], second[i] = x[i], x[THREADS + i]
    cuda.syncthreads()
    at = 4 * (THREADS - 1 - i)
    y[i] = ptx.load_shared(ptx.shared_address(second) + at)
    y[THREADS + i] = ptx.load_shared(ptx.shared_address(first) + at)


def loads(name, instruction, kind, count):
    """The kernel that reads ``count`` elements a thread from shared memory, in reverse threads' order."""
    primitive, pointer = getattr(ptx, name), types.CPointer(kind)

    def one(x, y):
        shared = cuda.shared.array(0, kind)
        i = int32(cuda.threadIdx.x)
        shared[i] = x[i]
        cuda.syncthreads()
        y[i] = primitive(ptx.shared_address(shared) + 4 * (THREADS - 1 - i))

    def two(x, y):
        shared = cuda.shared.array(0, kind)
        i = int32(cuda.threadIdx.x)
        shared[i], shared[THREADS + i] = x[i], x[THREADS + i]
        cuda.syncthreads()
        y[2 * i], y[2 * i + 1] = primitive(ptx.shared_address(shared) + 8 * (THREADS - 1 - i))

    function = one if count == 1 else two
    function.__name__ = name
    return kernel([instruction], pointer, pointer)(function)


def stores(name, instruction, kind, count):
    """The kernel that writes ``count`` elements a thread to shared memory, in reverse threads' order."""
    primitive, pointer = getattr(ptx, name), types.CPointer(kind)

    def one(x, y):
        shared = cuda.shared.array(0, kind)
        i = int32(cuda.threadIdx.x)
        primitive(ptx.shared_address(shared) + 4 * (THREADS - 1 - i), x[i])
        cuda.syncthreads()
        y[i] = shared[i]

    def two(x, y):
        shared = cuda.shared.array(0, kind)
        i = int32(cuda.threadIdx.x)
        primitive(ptx.shared_address(shared) + 8 * (THREADS - 1 - i), x[2 * i], x[2 * i + 1])
        cuda.syncthreads()
        y[i], y[THREADS + i] = shared[i], shared[THREADS + i]

    def four(x, y):
        shared = cuda.shared.array(0, kind)
        i = int32(cuda.threadIdx.x)
        at = 4 * i
        primitive(ptx.shared_address(shared) + 16 * (THREADS - 1 - i), x[at], x[at + 1], x[at + 2], x[at + 3])
        cuda.syncthreads()
        for j in range(i, 4 * THREADS, THREADS):
            y[j] = shared[j]

    function = {1: one, 2: two, 4: four}[count]
    function.__name__ = name
    return kernel([instruction], pointer, pointer)(function)


# name -> (kernel, type of an element, elements a thread)
SHARED = {
    "load_shared": (loads("load_shared", "ld.shared.f32 %, [%];", types.float32, 1), types.float32, 1),
    "load_shared2": (loads("load_shared2", "ld.shared.v2.f32 {%, %}, [%];", types.float32, 2), types.float32, 2),
    "load_shared2_bits": (loads("load_shared2_bits", "ld.shared.v2.b32 {%, %}, [%];", types.int32, 2), types.int32, 2),
    "store_shared": (stores("store_shared", "st.shared.f32 [%], %;", types.float32, 1), types.float32, 1),
    "store_shared_bits": (stores("store_shared_bits", "st.shared.b32 [%], %;", types.int32, 1), types.int32, 1),
    "store_shared2": (stores("store_shared2", "st.shared.v2.f32 [%], {%, %};", types.float32, 2), types.float32, 2),
    "store_shared2_bits": (stores("store_shared2_bits", "st.shared.v2.b32 [%], {%, %};", types.int32, 2), types.int32, 2),
    "store_shared4_bits": (stores("store_shared4_bits", "st.shared.v4.b32 [%], {%, %, %, %};", types.int32, 4), types.int32, 4),
}


@kernel(["ld.volatile.shared.b32 %, [%];"], INTS, INTS)
def load_shared_anew(x, y):
    """Twice from one address, which another thread writes in between."""
    shared = cuda.shared.array(0, int32)
    i = int32(cuda.threadIdx.x)
    at = ptx.shared_address(shared) + 4 * (THREADS - 1 - i)
    shared[i] = x[i]
    cuda.syncthreads()
    y[i] = ptx.load_shared_anew(at)
    cuda.syncthreads()
    shared[i] = x[THREADS + i]
    cuda.syncthreads()
    y[THREADS + i] = ptx.load_shared_anew(at)


def drawn_ints(count):
    return torch.randint(-(2**31), 2**31, (count,), device="cuda").to(torch.int32)


@on_hopper
def test_shared_address():
    x = torch.randn(2, THREADS, device="cuda")
    y = torch.zeros_like(x)
    shared_address(1, x, y)
    assert torch.equal(y, x.flip(0, 1))


@on_hopper
@pytest.mark.parametrize("name", SHARED)
def test_shared_memory(name):
    kernel, kind, count = SHARED[name]
    x = drawn_ints(count * THREADS) if kind == types.int32 else torch.randn(count * THREADS, device="cuda")
    y = torch.zeros_like(x)
    kernel(1, x, y, shared_bytes=4 * count * THREADS)
    assert torch.equal(y, x.view(-1, count).flip(0).flatten())


@on_hopper
def test_load_shared_anew():
    x = drawn_ints(2 * THREADS)
    y = torch.zeros_like(x)
    load_shared_anew(1, x, y, shared_bytes=4 * THREADS)
    assert torch.equal(y.view(2, -1), x.view(2, -1).flip(1))


# Among a warp's threads.

warp_max = unary(kernel, "warp_max", "redux.sync.max.s32 %, %, 0xffffffff;", INTS, INTS)
warp_min = unary(kernel, "warp_min", "redux.sync.min.s32 %, %, 0xffffffff;", INTS, INTS)


@on_hopper
@pytest.mark.parametrize(("kernel", "meaning"), [(warp_max, torch.amax), (warp_min, torch.amin)], ids=["warp_max", "warp_min"])
def test_warp_max_and_min(kernel, meaning):
    x = drawn_ints(64 * 32).view(64, 32)
    x[:8], x[8:16] = x[:8].abs(), x[:8] | -(2**31)  # of one sign
    (got,) = results(kernel, [x], [torch.int32], "cuda")
    assert torch.equal(got.view(64, 32), meaning(x, 1, keepdim=True).expand(-1, 32).cpu())


# Between warpgroups, the first of which gives values to the second through shared memory, over and over. Both are late
# at times, so that one that does not wait finds wrong values.


@kernel(["bar.sync %, %;", "bar.arrive %, %;"], FLOATS, FLOATS, types.int32, threads=2 * THREADS)
def named_barriers(x, y, rounds):
    shared = cuda.shared.array(0, float32)
    thread = int32(cuda.threadIdx.x)
    place = thread % THREADS
    if thread < THREADS:
        for r in range(rounds):
            if r > 0:
                ptx.barrier_sync(2, 2 * THREADS)
            cuda.nanosleep(r % 3 * 1000)
            shared[place] = x[THREADS * r + place]
            ptx.barrier_arrive(1, 2 * THREADS)
    else:
        for r in range(rounds):
            ptx.barrier_sync(1, 2 * THREADS)
            cuda.nanosleep(r % 2 * 2000)
            y[THREADS * r + place] = shared[THREADS - 1 - place]
            if r < rounds - 1:
                ptx.barrier_arrive(2, 2 * THREADS)


@kernel(
    [
        *("mbarrier.init.shared::cta.b64 [%], %;", "fence.mbarrier_init.release.cluster;"),
        *("mbarrier.arrive.shared::cta.b64 _, [%];", "mbarrier.try_wait.parity.shared::cta.b64 p, [%], %; @!p bra AGAIN;"),
    ],
    *(FLOATS, FLOATS, types.int32),
    threads=2 * THREADS,
)
def mbarriers(x, y, rounds):
    shared = cuda.shared.array(0, float32)
    thread = int32(cuda.threadIdx.x)
    place = thread % THREADS
    full = ptx.shared_address(shared) + 4 * THREADS
    empty = full + 8
    if thread == 0:
        ptx.mbarrier_init(full, THREADS)
        ptx.mbarrier_init(empty, THREADS)
        ptx.mbarrier_init_fence()
    cuda.syncthreads()
    if thread < THREADS:
        for r in range(rounds):
            if r > 0:
                ptx.mbarrier_wait(empty, (r - 1) & 1)
            cuda.nanosleep(r % 3 * 1000)
            shared[place] = x[THREADS * r + place]
            ptx.mbarrier_arrive(full)
    else:
        for r in range(rounds):
            ptx.mbarrier_wait(full, r & 1)
            cuda.nanosleep(r % 2 * 2000)
            y[THREADS * r + place] = shared[THREADS - 1 - place]
            ptx.mbarrier_arrive(empty)


@on_hopper
@pytest.mark.parametrize("kernel", [named_barriers, mbarriers], ids=["named", "mbarrier"])
def test_barriers(kernel, rounds=7):
    x = torch.randn(rounds, THREADS, device="cuda")
    y = torch.zeros_like(x)
    kernel(1, x, y, rounds, shared_bytes=4 * THREADS + 16)
    assert torch.equal(y, x.flip(1))


@kernel(
    [
        "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%], %;",
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%], [%], %, [%];",
    ],
    *(FLOATS, FLOATS, types.int32),
)
def bulk_copies(x, y, rounds):
    """A round, two copies: the last quarter of 4 * THREADS values to the front, the first three behind it."""
    shared = cuda.shared.array(0, float32)
    i, base = int32(cuda.threadIdx.x), ptx.shared_address(shared)
    size, quarter = 16 * THREADS, 4 * THREADS
    barrier = base + rounds * size
    if i == 0:
        ptx.mbarrier_init(barrier, 1)
        ptx.mbarrier_init_fence()
    cuda.syncthreads()
    for r in range(rounds):
        if i == 0:
            to, source = base + r * size, ptx.global_address(x) + r * size
            ptx.mbarrier_arrive_expect(barrier, size)
            ptx.bulk_copy(to, source + 3 * quarter, quarter, barrier)
            ptx.bulk_copy(to + quarter, source, 3 * quarter, barrier)
        ptx.mbarrier_wait(barrier, r & 1)
        for j in range(4):
            e = (4 * r + j) * THREADS
            y[e + i] = shared[e + i]
        cuda.syncthreads()  # no phase may end before all have seen the one before it


@on_hopper
def test_bulk_copy(rounds=4):
    x = torch.randn(rounds, 4, THREADS, device="cuda")
    y = torch.zeros_like(x)
    bulk_copies(1, x, y, rounds, shared_bytes=4 * x.numel() + 8)
    assert torch.equal(y, x.roll(1, 1))


BOX = 8, 3, 4, 1  # width, height, channels, images


@kernel(
    [
        "fence.proxy.tensormap::generic.acquire.gpu [%], 128;",
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%], [%, {%, %, %, %}], [%];",
    ],
    *(LONGS, INTS, FLOATS, types.int32),
)
def bulk_copy_boxes(tensor_map, corners, y, boxes):
    """A box of the tensor at each of the corners [boxes, 4], one after another."""
    shared = cuda.shared.array(0, float32)
    i, base = int32(cuda.threadIdx.x), ptx.shared_address(shared)
    values = BOX[0] * BOX[1] * BOX[2]
    barrier = base + 4 * values
    if i == 0:
        ptx.mbarrier_init(barrier, 1)
        ptx.mbarrier_init_fence()
        ptx.tensor_map_fence(ptx.global_address(tensor_map))
    cuda.syncthreads()
    for box in range(boxes):
        if i == 0:
            ptx.mbarrier_arrive_expect(barrier, 4 * values)
            at = 4 * box
            x, y_, z, w = corners[at], corners[at + 1], corners[at + 2], corners[at + 3]
            ptx.bulk_copy_box(base, ptx.global_address(tensor_map), x, y_, z, w, barrier)
        ptx.mbarrier_wait(barrier, box & 1)
        if i < values:
            y[values * box + i] = shared[i]
        cuda.syncthreads()


CORNERS = {
    "inside": [(0, 0, 0, 0), (4, 2, 0, 1)],
    "over an edge": [(8, 3, 0, 1), (4, 4, 0, 0)],
    "outside": [(12, 0, 0, 0), (0, 5, 0, 1)],
    "beyond channels or images": [(0, 0, 2, 0), (0, 0, 0, 2)],
}


@on_hopper
@pytest.mark.parametrize("corners", CORNERS.values(), ids=CORNERS)
def test_bulk_copy_box(corners):
    """Whatever is outside is zero."""
    x = torch.randn(2, 4, 5, 12, device="cuda")
    y = torch.full((len(corners), *reversed(BOX)), float("nan"), device="cuda")
    words = tensor_map.encode(x, BOX)
    bulk_copy_boxes(
        1,
        torch.tensor(words, device="cuda"),
        torch.tensor(corners, dtype=torch.int32, device="cuda"),
        y,
        len(corners),
        shared_bytes=y[0].nbytes + 8,
    )
    padded = F.pad(x, (8, 8, 8, 8, 8, 8, 8, 8))
    for box, corner in zip(y, corners):
        place = tuple(slice(8 + at, 8 + at + size) for at, size in zip(reversed(corner), reversed(BOX)))
        assert torch.equal(box, padded[place]), corner


# Registers from a warpgroup to another: two blocks of 256 threads to a multiprocessor are 128 registers a thread.

FEWER, MORE = 40, 216
VALUES = 160  # a thread's in registers at a time, more than 128
fewer_registers, more_registers = ptx.set_registers(FEWER, more=False), ptx.set_registers(MORE, more=True)


@device
def load_value(i, values, x, at):
    values[i] = ptx.load(x, at + i * THREADS)


@device
def store_value(i, values, y, at):
    y[at + i * THREADS] = values[VALUES - 1 - i]


load_values, store_values = unroll(VALUES, load_value), unroll(VALUES, store_value)


@kernel(
    [f"setmaxnreg.dec.sync.aligned.u32 {FEWER};", f"setmaxnreg.inc.sync.aligned.u32 {MORE};"],
    *(FLOATS, FLOATS),
    threads=2 * THREADS,
    blocks=2,
)
def set_registers(x, y):
    """x [1 + VALUES, THREADS]: the first row negated by those who give, the others in reverse by those who take."""
    thread = int32(cuda.threadIdx.x)
    place = int32(thread % THREADS)
    group = cuda.shfl_sync(0xFFFFFFFF, thread // THREADS, 0)  # so that the compiler knows it is the same for a warp
    if group == 0:
        fewer_registers()
        y[place] = -x[place]
    else:
        more_registers()
        values = cuda.local.array(VALUES, float32)
        load_values(values, x, THREADS + place)
        store_values(values, y, THREADS + place)


@on_hopper
def test_set_registers():
    x = torch.randn(1 + VALUES, THREADS, device="cuda")
    y = torch.zeros_like(x)
    set_registers(1, x, y)
    assert torch.equal(y, torch.cat([-x[:1], x[1:].flip(0)]))


@pytest.mark.parametrize("name", KERNELS)
def test_instructions(name, compiler):
    check_instructions(*KERNELS[name])


def test_load_shared_anew_is_not_merged(compiler):
    """Two loads of an address with nothing in between are two instructions."""

    def twice(y):
        at = ptx.shared_address(cuda.shared.array(0, int32))
        y[0] = ptx.load_shared_anew(at) - ptx.load_shared_anew(at)

    assert Kernel(twice, types.void(INTS), THREADS, 1).ptx((9, 0, "a")).count("ld.volatile.shared.b32") == 2
