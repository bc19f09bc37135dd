"""Turns, stages and rings: their instructions (compiled, without a GPU), and that no one goes on too early (GPU)."""

import numpy as np
import pytest
import torch
from numba import cuda, int32, uint8
from numba.cuda import types

from numba_impl.cuda import pipeline
from numba_impl.cuda.ptx import barrier, copy, memory
from numba_impl.cuda.shared import BARRIER, Field, Layout
from tests.cuda.intrinsics import INTS, check_instructions, on_hopper, registry, start

GROUP = 128
ALL_LANES = 0xFFFFFFFF
KERNELS, kernel = registry()

WAIT = "mbarrier.try_wait.parity.shared::cta.b64 p, [%], %;"
ARRIVE = "mbarrier.arrive.shared::cta.b64 _, [%];"
INIT = "mbarrier.init.shared::cta.b64 [%], %;"

# Who has the turn writes itself to the log, whose length is in shared memory, without an atomic.
TURNS = Layout(Field("length", (1,), np.int32))
turn = pipeline.turn((1, 2), 2 * GROUP)


@kernel(["bar.sync %, %;", "bar.arrive %, %;"], INTS, types.int32, threads=2 * GROUP, shared_bytes=TURNS.bytes)
def take_turns(log, rounds):
    shared, thread = memory.shared_address(cuda.shared.array(0, uint8)), int32(cuda.threadIdx.x)
    if thread == 0:
        memory.store_shared(shared, int32, 0)
    cuda.syncthreads()
    group = cuda.shfl_sync(ALL_LANES, thread // GROUP, 0)
    if group == 1:
        turn.give(group)
    for _ in range(rounds):
        turn.take(group)
        if thread % GROUP == 0:
            length = memory.load_shared(shared, int32)
            log[length] = group
            memory.store_shared(shared, int32, length + 1)
        turn.give(group)
    if group == 0:
        turn.take(group)  # what the other gave last


def staged(count):
    """The kernel y = x, of rows of GROUP int32, through ``count`` stages."""
    layout = Layout(Field("rows", (count, GROUP), np.int32, align=16), Field("filled", (count,), BARRIER))
    stages = pipeline.stages(layout.places.rows, layout.places.filled)
    SIZE = 4 * GROUP

    copying = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%], [%], %, [%];"
    expecting = "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%], %;"

    @kernel([INIT, WAIT, copying, expecting], INTS, INTS, types.int32, label=f"by {count}", shared_bytes=layout.bytes)
    def stage(x, y, rows):
        shared, thread = memory.shared_address(cuda.shared.array(0, uint8)), int32(cuda.threadIdx.x)
        if thread == 0:
            stages.start(shared)
            barrier.mbarrier_init_fence()
            for number in range(min(rows, count)):
                at, filled = stages.expect(shared, stages.slot(number))
                copy.bulk(at, memory.global_address(x) + SIZE * number, SIZE, filled)
        cuda.syncthreads()
        for number in range(rows):
            at = stages.wait(shared, stages.slot(number))
            y[GROUP * number + thread] = memory.load_shared(at + 4 * (GROUP - 1 - thread), int32)
            cuda.syncthreads()
            if thread == 0 and number + count < rows:
                at, filled = stages.expect(shared, stages.slot(number + count))
                copy.bulk(at, memory.global_address(x) + SIZE * (number + count), SIZE, filled)

    return stage


def ringed(count):
    """The kernel of two consumers' y [2, rows, GROUP] = x [rows, GROUP], through a ring of ``count`` slots.

    A third warpgroup fills it. Of every third row the second consumer takes nothing, and the first releases it for both.
    """
    slots = Field("full", (count,), BARRIER), Field("empty", (count,), BARRIER)
    layout = Layout(Field("rows", (count, GROUP), np.int32), *slots)
    ROWS, FULL, EMPTY = layout.places
    ring = pipeline.ring(FULL, EMPTY, fillers=GROUP, uses=8)

    @kernel([INIT, WAIT, ARRIVE], INTS, INTS, types.int32, label=f"of {count}", threads=3 * GROUP, shared_bytes=layout.bytes)
    def ring_of_rows(x, y, rows):
        shared, thread = memory.shared_address(cuda.shared.array(0, uint8)), int32(cuda.threadIdx.x)
        if thread == 0:
            ring.start(shared)
        cuda.syncthreads()
        group, thread = cuda.shfl_sync(ALL_LANES, thread // GROUP, 0), int32(thread % GROUP)
        for number in range(rows):
            slot, alone = ring.slot(number), number % 3 == 2
            row = pipeline.element(shared, ROWS, slot.which)
            if group == 2:
                ring.acquire(shared, slot)
                memory.store_shared(row + 4 * thread, int32, x[GROUP * number + thread])
                ring.publish(shared, slot)
            elif group == 0 or not alone:
                ring.wait(shared, slot)
                y[GROUP * (group * rows + number) + thread] = memory.load_shared(row + 4 * (GROUP - 1 - thread), int32)
                cuda.syncwarp()
                if thread % 32 == 0:
                    ring.release(shared, slot, alone)

    return ring_of_rows


COUNTS = [1, 2, 3, 4]
STAGES, RINGS = {count: staged(count) for count in COUNTS}, {count: ringed(count) for count in COUNTS}


@pytest.mark.parametrize("name", KERNELS)
def test_instructions(name, compiler):
    check_instructions(*KERNELS[name])


@pytest.mark.parametrize("count", COUNTS)
def test_slots(count):
    """Also of the largest number that 32 bits hold."""
    slot = pipeline._slots(count).py_func
    for number in [*range(40), 2**31 - 1, 2**31 - 2, *torch.randint(2**31, (1000,)).tolist()]:
        assert slot(number) == (number % count, number // count % 2)


def test_slots_are_found_without_a_division(compiler):
    text = STAGES[3].ptx((9, 0, "a"))
    assert "div." not in text and "rem." not in text


@on_hopper
@pytest.mark.parametrize("rounds", [1, 2, 1000])
def test_turns_alternate(rounds):
    log = torch.full((2 * rounds + 1,), -1, dtype=torch.int32, device="cuda")
    start(take_turns, log, numbers=(rounds,))
    assert log.tolist() == [0, 1] * rounds + [-1]


@on_hopper
@pytest.mark.parametrize("rows", [1, 3, 1000])
@pytest.mark.parametrize("count", COUNTS)
def test_stages(count, rows):
    x = torch.randint(2**31, (rows, GROUP), device="cuda").int()
    y = torch.zeros_like(x)
    start(STAGES[count], x, y, numbers=(rows,))
    assert torch.equal(y, x.flip(1))


@on_hopper
@pytest.mark.parametrize("rows", [1, 2, 3, 1000])
@pytest.mark.parametrize("count", COUNTS)
def test_rings(count, rows):
    x = torch.randint(2**31, (rows, GROUP), device="cuda").int()
    y = torch.zeros(2, rows, GROUP, dtype=torch.int32, device="cuda")
    start(RINGS[count], x, y, numbers=(rows,))
    want = torch.stack([x, x]).flip(2)
    want[1, 2::3] = 0
    assert torch.equal(y, want)
