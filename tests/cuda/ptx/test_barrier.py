"""``ptx.barrier``: the primitives in kernels, their exact instructions (compiled, without a GPU), and what they do (GPU)."""

import pytest
import torch
from numba import cuda, float32, int32
from numba.cuda import types

from numba_impl.cuda.ptx import barrier, memory
from tests.cuda.intrinsics import FLOATS, THREADS, check_instructions, on_hopper, registry, start

KERNELS, kernel = registry()


# Between warpgroups, the first of which gives values to the second through shared memory, over and over. Both are late
# at times, so that one that does not wait finds wrong values.


@kernel(["bar.sync %, %;", "bar.arrive %, %;"], FLOATS, FLOATS, types.int32, threads=2 * THREADS, shared_bytes=4 * THREADS)
def named_barriers(x, y, rounds):
    shared = cuda.shared.array(0, float32)
    thread = int32(cuda.threadIdx.x)
    place = thread % THREADS
    if thread < THREADS:
        for r in range(rounds):
            if r > 0:
                barrier.sync(2, 2 * THREADS)
            cuda.nanosleep(r % 3 * 1000)
            shared[place] = x[THREADS * r + place]
            barrier.arrive(1, 2 * THREADS)
    else:
        for r in range(rounds):
            barrier.sync(1, 2 * THREADS)
            cuda.nanosleep(r % 2 * 2000)
            y[THREADS * r + place] = shared[THREADS - 1 - place]
            if r < rounds - 1:
                barrier.arrive(2, 2 * THREADS)


@kernel(
    [
        *("mbarrier.init.shared::cta.b64 [%], %;", "fence.mbarrier_init.release.cluster;"),
        *("mbarrier.arrive.shared::cta.b64 _, [%];", "mbarrier.try_wait.parity.shared::cta.b64 p, [%], %; @!p bra AGAIN;"),
    ],
    *(FLOATS, FLOATS, types.int32),
    threads=2 * THREADS,
    shared_bytes=4 * THREADS + 16,
)
def mbarriers(x, y, rounds):
    shared = cuda.shared.array(0, float32)
    thread = int32(cuda.threadIdx.x)
    place = thread % THREADS
    full = memory.shared_address(shared) + 4 * THREADS
    empty = full + 8
    if thread == 0:
        barrier.mbarrier_init(full, THREADS)
        barrier.mbarrier_init(empty, THREADS)
        barrier.mbarrier_init_fence()
    cuda.syncthreads()
    if thread < THREADS:
        for r in range(rounds):
            if r > 0:
                barrier.mbarrier_wait(empty, (r - 1) & 1)
            cuda.nanosleep(r % 3 * 1000)
            shared[place] = x[THREADS * r + place]
            barrier.mbarrier_arrive(full)
    else:
        for r in range(rounds):
            barrier.mbarrier_wait(full, r & 1)
            cuda.nanosleep(r % 2 * 2000)
            y[THREADS * r + place] = shared[THREADS - 1 - place]
            barrier.mbarrier_arrive(empty)


@on_hopper
@pytest.mark.parametrize("kernel", [named_barriers, mbarriers], ids=["named", "mbarrier"])
def test_barriers(kernel, rounds=7):
    x = torch.randn(rounds, THREADS, device="cuda")
    y = torch.zeros_like(x)
    start(kernel, x, y, numbers=(rounds,))
    assert torch.equal(y, x.flip(1))


@pytest.mark.parametrize("name", KERNELS)
def test_instructions(name, compiler):
    check_instructions(*KERNELS[name])
