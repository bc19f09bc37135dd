"""The matrix products of a warpgroup: its exact instructions (compiled, without a GPU), and the sums, against float64 (GPU)."""

import functools

import numpy as np
import pytest
import torch
from numba import cuda, float32, int32, int64
from numba.cuda import types

from numba_impl.backends.hopper.products import products
from numba_impl.cuda import fragments, pipeline
from numba_impl.cuda.device import device
from numba_impl.cuda.kernel import Kernel
from numba_impl.cuda.ptx.barrier import mbarrier_init_fence
from numba_impl.cuda.ptx.copy import bulk
from numba_impl.cuda.ptx.memory import global_address, shared_address
from numba_impl.cuda.shared import BARRIER, Field, Layout
from tests.cuda.intrinsics import FLOATS, INTS, THREADS, assert_near, check_instructions, on_hopper, start

# Matrix products of the first warpgroup, while the second waits for the weights and passes on the turn.

ROWS, A_COUNT, B_COUNT = 64, 3, 4
# Depth, and (tile, a, b): that tile's sums are those of the products A[a] B[b].
ONE_STEP = 16, ((0, 0, 0),)
SEVERAL_STEPS = 48, ((0, 0, 0), (1, 0, 1), (1, 1, 2), (3, 2, 3), (0, 2, 1), (2, 1, 0), (3, 2, 2))
every_product = pytest.mark.parametrize("columns", [8, 24, 64])
every_schedule = pytest.mark.parametrize(("depth", "terms"), [ONE_STEP, SEVERAL_STEPS], ids=["one", "several"])


def schedule(columns, depth, terms):
    """The steps, as ``products`` takes them: two for each 16 of depth, one of the first A, one of the others."""
    matrix = depth * columns * 2 // 16  # a B, in a descriptor's units
    steps = []
    for k in range(depth // 16):
        for group in ((0,), tuple(range(1, A_COUNT))):
            used = [(tile, group.index(a), b % 2, b // 2 * 2 * matrix + k * 2 * columns) for tile, a, b in terms if a in group]
            if used:
                steps.append(([(a, 32 * k) for a in group], used))
    return steps


@functools.cache
def build_products(columns, depth, terms):
    """The kernel of a [A_COUNT, ROWS, depth] fp16, b [B_COUNT, depth / 8, columns, 8] fp16 and out [tiles, ROWS, columns]."""
    TILES, SUMS = 1 + max(tile for tile, _, _ in terms), columns // 2
    layout = Layout(
        Field("b", (B_COUNT, depth // 8, columns, 8), np.float16),
        Field("a", (A_COUNT, ROWS, depth), np.float16),
        Field("loaded", (1,), BARRIER),
    )
    A, B, LOADED = layout.places.a, layout.places.b, layout.places.loaded
    DESCRIPTOR = fragments.descriptor(columns)
    load_fragments, multiply, settle = products(schedule(columns, depth, terms), columns)
    turn, loading = pipeline.turn((1, 2), 2 * THREADS), pipeline.stages(B, LOADED)
    accumulator, loaded_row = device(fragments.accumulator), device(fragments.loaded_row)

    def matrix_products(a, b, out):
        memory = cuda.shared.array(0, int32)
        shared, thread = shared_address(memory), int32(cuda.threadIdx.x)
        if thread == 0:
            loading.start(shared)
            mbarrier_init_fence()
            at, loaded = loading.expect(shared, loading.slot(0))
            bulk(at, global_address(b), B.size, loaded)
        for i in range(thread, A.size // 4, 2 * THREADS):
            memory[A.at // 4 + i] = a[i]
        cuda.syncthreads()
        group = cuda.shfl_sync(0xFFFFFFFF, thread // THREADS, 0)  # so that the compiler knows it is the same for a warp
        if group == 0:
            sums = cuda.local.array((TILES, SUMS), float32)
            row, k = loaded_row(thread)
            at = shared + A.at + (row * depth + k) * 2
            descriptor = int64(shared + B.at >> 4) | DESCRIPTOR
            rows, matrices = (at, at + A.step, at + 2 * A.step), (descriptor, descriptor + B.step // 16)
            first = load_fragments(rows)
            turn.take(group)
            pending = multiply(first, rows, matrices)
            turn.give(group)
            settle(sums, pending)
            for tile in range(TILES):
                for i in range(SUMS):
                    row, column = accumulator(thread, i)
                    out[(tile * ROWS + row) * columns + column] = sums[tile, i]
        else:
            loading.wait(shared, loading.slot(0))
            turn.give(group)
            turn.take(group)

    return Kernel(matrix_products, types.void(INTS, INTS, FLOATS), 2 * THREADS, 1, shared_bytes=layout.bytes)


@on_hopper
@every_product
@every_schedule
def test_products(columns, depth, terms):
    kernel = build_products(columns, depth, terms)
    a = torch.randn(A_COUNT, ROWS, depth, device="cuda").half()
    b = torch.randn(B_COUNT, depth, columns, device="cuda").half()
    tiles = 1 + max(tile for tile, _, _ in terms)
    out = torch.full((tiles, ROWS, columns), float("nan"), device="cuda")
    packed = b.view(B_COUNT, depth // 8, 8, columns).transpose(2, 3).contiguous()
    start(kernel, a.view(torch.int32), packed.view(torch.int32), out)
    want, size = torch.zeros_like(out, dtype=torch.float64), torch.zeros_like(out, dtype=torch.float64)
    for tile, i, j in terms:
        want[tile] += a[i].double() @ b[j].double()
        size[tile] += a[i].double().abs() @ b[j].double().abs()
    # Products are exact; an addition truncates to 24 bits of the largest so far, and each tile has at most two terms.
    additions = 2 * (depth + depth // 16)
    assert_near(out, want, additions * 2.0**-23 * size)


@every_product
@every_schedule
def test_product_instructions(columns, depth, terms, compiler):
    kernel = build_products(columns, depth, terms)
    sums = ", ".join(["%"] * (columns // 2))
    instructions = [
        f"wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.f16.f16 {{{sums}}}, {{%, %, %, %}}, %, p, 1, 1, 0;",
        *("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%, %, %, %}, [% + 0];", "bar.sync %, %;", "bar.arrive %, %;"),
        *("wgmma.fence.sync.aligned;", "wgmma.commit_group.sync.aligned;", "wgmma.wait_group.sync.aligned 0;"),
    ]
    check_instructions(kernel, instructions)
