"""``ptx.memory``: each primitive in kernels, for each dtype and number of neighbours: its exact instruction (compiled, without a
GPU), and what it does (GPU, and the simulator for those of an array). The other side of each access is Numba's own."""

import pytest
import torch
from numba import cuda, float32, int32
from numba.cuda import types

from numba_impl.cuda.device import device
from numba_impl.cuda.kernel import Kernel
from numba_impl.cuda.ptx import memory
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

OUTSIDE = 2**46  # bytes past an array: an access there fails
KERNELS, kernel = registry()

# dtype, neighbours (None for a single value): what the instruction of one access ends in, and its registers.
ACCESSES = {
    (types.float32, None): ("f32", "%"),
    (types.float32, 1): ("f32", "%"),
    (types.float32, 2): ("v2.f32", "{%, %}"),
    (types.float32, 4): ("v4.f32", "{%, %, %, %}"),
    (types.int32, None): ("b32", "%"),
    (types.int32, 2): ("v2.b32", "{%, %}"),
    (types.int32, 4): ("v4.b32", "{%, %, %, %}"),
    (types.float16, None): ("b16", "%"),
    (types.float16, 2): ("v2.b16", "{%, %}"),
    (types.float16, 4): ("v4.b16", "{%, %, %, %}"),
    (types.float16, 8): ("v4.b32", "{%, %, %, %}"),
    (types.int16, None): ("b16", "%"),
    (types.int16, 1): ("b16", "%"),
    (types.int16, 8): ("v4.b32", "{%, %, %, %}"),
}
every_access = pytest.mark.parametrize(("dtype", "count"), ACCESSES, ids=lambda value: str(value))


def gather(count):
    """The device function (array, at) -> what stands there: a single value, or a tuple of ``count``."""
    if count is None:
        return device(lambda array, at: array[at])
    if count == 1:
        return device(lambda array, at: (array[at],))
    half, n = gather(count // 2), count // 2
    return device(lambda array, at: half(array, at) + half(array, at + n))


def scatter(count):
    """The device function (array, at, values) that puts there what ``gather`` gives."""

    @device
    def single(array, at, value):
        array[at] = value

    @device
    def several(array, at, values):
        for j in range(count):
            array[at + j] = values[j]

    return single if count is None else several


def draw_keep(device):
    """An int32 a thread, zero for one in four."""
    values = torch.tensor([0, 1, 2, -1], dtype=torch.int32, device=device).repeat(THREADS // 4)
    return values[torch.randperm(THREADS, device=device)]


def draw(dtype, count, device):
    """(x [THREADS, count], y of the same shape with other values)."""
    x = drawn(DTYPES[dtype], THREADS, count or 1, device=device)
    return x, torch.full_like(x, int(SENTINEL))


# Of arrays by index. Elements change places, so that none is right by having stayed where it was.


def build_of_arrays(dtype, count):
    """The kernels of ``load`` and ``store`` of global memory, and of both in shared memory; in reverse threads' order."""
    suffix, registers = ACCESSES[dtype, count]
    suffix, n = suffix[:-3] + "?" + suffix[-2:], count or 1  # NVVM chooses the letter
    pointer, label, gathered, scattered = types.CPointer(dtype), f"{dtype} {count}", gather(count), scatter(count)

    @kernel([f"ld.global.{suffix} {registers}, [%];"], pointer, pointer, label=label)
    def load(x, y):
        i = int32(cuda.threadIdx.x)
        at = n * (THREADS - 1 - i)
        if count is None:
            scattered(y, n * i, memory.load(x, at))
        else:
            scattered(y, n * i, memory.load(x, at, count))

    @kernel([f"st.global.{suffix} [%], {registers};"], pointer, pointer, label=label)
    def store(x, y):
        i = int32(cuda.threadIdx.x)
        memory.store(y, n * (THREADS - 1 - i), gathered(x, n * i))

    instructions = f"ld.shared.{suffix} {registers}, [%];", f"st.shared.{suffix} [%], {registers};"

    @kernel(instructions, pointer, pointer, label=label, shared_bytes=THREADS * n * dtype.bitwidth // 8)
    def through_shared(x, y):
        shared = cuda.shared.array(0, dtype)
        i = int32(cuda.threadIdx.x)
        memory.store(shared, n * i, gathered(x, n * i))
        cuda.syncthreads()
        at = n * (THREADS - 1 - i)
        if count is None:
            scattered(y, n * i, memory.load(shared, at))
        else:
            scattered(y, n * i, memory.load(shared, at, count))

    return load, store, through_shared


OF_ARRAYS = {access: build_of_arrays(*access) for access in ACCESSES}


@on_both
@every_access
@pytest.mark.parametrize("which", [0, 1, 2], ids=["load", "store", "through shared memory"])
def test_of_arrays(which, dtype, count, kernel_device):
    x, y = draw(dtype, count, kernel_device)
    start(OF_ARRAYS[dtype, count][which], x, y)
    assert torch.equal(y, x.flip(0))


@kernel(["ld.global.?32 %, [%];"], FLOATS, FLOATS, types.int32)
def load_backwards(x, y, size):
    i = cuda.grid(1)
    if i < size:
        y[i] = memory.load(x, size - 1 - i)


@on_both
def test_load_of_an_int64_index(kernel_device):
    x = torch.randn(300, device=kernel_device)
    y = torch.zeros_like(x)
    start(load_backwards, x, y, numbers=(300,), blocks=3)
    assert torch.equal(y, x.flip(0))


@kernel(
    ["ld.shared.?32 %, [%];", "ld.shared.v4.?32 {%, %, %, %}, [%];", "st.shared.v4.?32 [%], {%, %, %, %};"],
    *(FLOATS, FLOATS),
    shared_bytes=16 * THREADS,
)
def vectors_then_values(x, y):
    """x through shared memory: all vectors in reverse, then the last values in reverse."""
    shared = cuda.shared.array(0, float32)
    i = int32(cuda.threadIdx.x)
    memory.store(shared, 4 * i, (x[4 * i], x[4 * i + 1], x[4 * i + 2], x[4 * i + 3]))
    cuda.syncthreads()
    a, b, c, d = memory.load(shared, 4 * (THREADS - 1 - i), 4)
    y[4 * i], y[4 * i + 1], y[4 * i + 2], y[4 * i + 3] = a, b, c, d
    y[4 * THREADS + i] = memory.load(shared, 4 * THREADS - 1 - i)


@on_both
def test_vectors_then_values(kernel_device):
    x = torch.randn(4 * THREADS, device=kernel_device)
    y = torch.zeros(5 * THREADS, device=kernel_device)
    start(vectors_then_values, x, y)
    assert torch.equal(y, torch.cat([x.view(-1, 4).flip(0).flatten(), x.flip(0)[:THREADS]]))


@kernel(["st.global.v2.?32 [%], {%, %};"], LONGS, INTS)
def converted(x, y):
    """Values of another type are converted; arguments have names; an index may be a constant."""
    i = int32(cuda.threadIdx.x)
    memory.store(y, 2 * i, (x[i], 7))
    if i == 0:
        memory.store(array=y, index=0, values=memory.load(y, index=0) + 1)


@on_both
def test_values_are_converted(kernel_device):
    x = torch.arange(THREADS, device=kernel_device) - 5
    y = torch.zeros(THREADS, 2, dtype=torch.int32, device=kernel_device)
    start(converted, x, y)
    want = torch.stack([x, torch.full_like(x, 7)], 1).int()
    want[0, 0] += 1
    assert torch.equal(y, want)


# By address.


@kernel([], FLOATS, LONGS)
def global_address(x, y):
    if cuda.threadIdx.x == 0:
        y[0] = memory.global_address(x)


@on_hopper
def test_global_address():
    x = torch.randn(5, device="cuda")[1:]
    y = torch.zeros(1, dtype=torch.int64, device="cuda")
    start(global_address, x, y)
    assert y.item() == x.data_ptr()


@kernel(["cvta.to.shared.u64 t, %; cvt.u32.u64 %, t;"], FLOATS, FLOATS)
def shared_address(x, y):
    first, second = cuda.shared.array(THREADS, float32), cuda.shared.array(THREADS, float32)
    i = int32(cuda.threadIdx.x)
    first[i], second[i] = x[i], x[THREADS + i]
    cuda.syncthreads()
    at = 4 * (THREADS - 1 - i)
    y[i] = memory.load_shared(memory.shared_address(second) + at, float32)
    y[THREADS + i] = memory.load_shared(memory.shared_address(first) + at, float32)


@on_hopper
def test_shared_address():
    x = torch.randn(2, THREADS, device="cuda")
    y = torch.zeros_like(x)
    start(shared_address, x, y)
    assert torch.equal(y, x.flip(0, 1))


def build_of_addresses(dtype, count):
    """The kernels of all loads and stores by address, by name; those of shared memory in reverse threads' order."""
    suffix, registers = ACCESSES[dtype, count]
    scalar, n, registers_n = suffix[-3:], count or 1, registers.count("%")
    size, cleared = n * dtype.bitwidth // 8, f"mov.{scalar} %, {'0f00000000' if scalar == 'f32' else '0'}; " * registers_n
    pointer, gathered, scattered = types.CPointer(dtype), gather(count), scatter(count)
    settings = {"label": f"{dtype} {count}", "shared_bytes": THREADS * size}

    @kernel([f"ld.shared.{suffix} {registers}, [%];"], pointer, pointer, **settings)
    def load_shared(x, y):
        shared = cuda.shared.array(0, dtype)
        i = int32(cuda.threadIdx.x)
        scattered(shared, n * i, gathered(x, n * i))
        cuda.syncthreads()
        at = memory.shared_address(shared) + size * (THREADS - 1 - i)
        if count is None:
            scattered(y, n * i, memory.load_shared(at, dtype))
        else:
            scattered(y, n * i, memory.load_shared(at, dtype, count))

    @kernel([f"st.shared.{suffix} [%], {registers};"], pointer, pointer, **settings)
    def store_shared(x, y):
        shared = cuda.shared.array(0, dtype)
        i = int32(cuda.threadIdx.x)
        memory.store_shared(memory.shared_address(shared) + size * (THREADS - 1 - i), dtype, gathered(x, n * i))
        cuda.syncthreads()
        for j in range(i, n * THREADS, THREADS):
            y[j] = shared[j]

    @kernel([f"ld.volatile.shared.{suffix} {registers}, [%];"], pointer, pointer, **settings)
    def load_shared_anew(x, y):
        """Twice from one address, which another thread writes in between."""
        shared = cuda.shared.array(0, dtype)
        i = int32(cuda.threadIdx.x)
        at = memory.shared_address(shared) + size * (THREADS - 1 - i)
        for half in range(2):
            scattered(shared, n * i, gathered(x, n * (half * THREADS + i)))
            cuda.syncthreads()
            if count is None:
                scattered(y, n * (half * THREADS + i), memory.load_shared_anew(at, dtype))
            else:
                scattered(y, n * (half * THREADS + i), memory.load_shared_anew(at, dtype, count))
            cuda.syncthreads()

    @kernel([f"{cleared}@p ld.shared.{suffix} {registers}, [%];"], pointer, INTS, pointer, **settings)
    def load_shared_or_zero(x, keep, y):
        shared = cuda.shared.array(0, dtype)
        i = int32(cuda.threadIdx.x)
        scattered(shared, n * i, gathered(x, n * i))
        cuda.syncthreads()
        at = memory.shared_address(shared) + size * (THREADS - 1 - i)
        at = at if keep[i] != 0 else -16  # an access there fails
        if count is None:
            scattered(y, n * i, memory.load_shared_or_zero(at, dtype, keep[i]))
        else:
            scattered(y, n * i, memory.load_shared_or_zero(at, dtype, keep[i], count))

    @kernel([f"{cleared}@p ld.global.nc.{suffix} {registers}, [%];"], pointer, LONGS, INTS, pointer, **settings)
    def load_global_or_zero(x, offsets, keep, y):
        i = int32(cuda.threadIdx.x)
        at = memory.global_address(x) + offsets[i]
        if count is None:
            scattered(y, n * i, memory.load_global_or_zero(at, dtype, keep[i]))
        else:
            scattered(y, n * i, memory.load_global_or_zero(at, dtype, keep[i], count))

    @kernel([f"@p st.global.cs.{suffix} [%], {registers};"], pointer, INTS, pointer, **settings)
    def stream(x, keep, y):
        i = int32(cuda.threadIdx.x)
        memory.stream(memory.global_address(y) + size * i, dtype, gathered(x, n * i), keep[i])

    built = load_shared, store_shared, load_shared_anew, load_shared_or_zero, load_global_or_zero, stream
    return {kernel.function.__name__: kernel for kernel in built}


OF_ADDRESSES = {access: build_of_addresses(*access) for access in ACCESSES}


@on_hopper
@every_access
@pytest.mark.parametrize("name", ["load_shared", "store_shared"])
def test_shared_memory(name, dtype, count):
    x, y = draw(dtype, count, "cuda")
    start(OF_ADDRESSES[dtype, count][name], x, y)
    assert torch.equal(y, x.flip(0))


@on_hopper
@every_access
def test_load_shared_anew(dtype, count):
    x = drawn(DTYPES[dtype], 2, THREADS, count or 1, device="cuda")
    y = torch.zeros_like(x)
    start(OF_ADDRESSES[dtype, count]["load_shared_anew"], x, y)
    assert torch.equal(y, x.flip(1))


@on_hopper
@every_access
def test_load_shared_or_zero(dtype, count):
    (x, y), keep = draw(dtype, count, "cuda"), draw_keep("cuda")
    start(OF_ADDRESSES[dtype, count]["load_shared_or_zero"], x, keep, y)
    assert torch.equal(y, torch.where(keep[:, None] != 0, x.flip(0), 0))


@on_hopper
@every_access
def test_load_global_or_zero(dtype, count):
    (x, y), keep = draw(dtype, count, "cuda"), draw_keep("cuda")
    places = torch.randint(THREADS, (THREADS,), device="cuda")
    offsets = torch.where(keep != 0, places * x[0].nbytes, OUTSIDE)
    start(OF_ADDRESSES[dtype, count]["load_global_or_zero"], x, offsets, keep, y)
    assert torch.equal(y, torch.where(keep[:, None] != 0, x[places], 0))


@on_hopper
@every_access
def test_stream(dtype, count):
    (x, y), keep = draw(dtype, count, "cuda"), draw_keep("cuda")
    before = y.clone()
    start(OF_ADDRESSES[dtype, count]["stream"], x, keep, y)
    assert torch.equal(y, torch.where(keep[:, None] != 0, x, before))


@pytest.mark.parametrize("name", KERNELS)
def test_instructions(name, compiler):
    check_instructions(*KERNELS[name])


def test_load_shared_anew_is_not_merged(compiler):
    """Two loads of an address with nothing in between are two instructions."""

    def twice(y):
        at = memory.shared_address(cuda.shared.array(0, int32))
        y[0] = memory.load_shared_anew(at, int32) - memory.load_shared_anew(at, int32)

    assert Kernel(twice, types.void(INTS), THREADS, 1).ptx((9, 0, "a")).count("ld.volatile.shared.b32") == 2
