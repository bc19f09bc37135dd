"""Transposed convolution k3 s2 p1 on Hopper's tensor cores at fp32 accuracy, parity-split, with the epilogue fused.

Every fp32 operand is the sum of two fp16 numbers, hi + lo, 22 bits; x * w is then
lo * hi + hi * lo + hi * hi, three products ("terms") into fp32 sums, or hi * hi alone for TF32.
Powers of two scale x and w so that neither leaves fp16's range; the epilogue takes them back.

A block stays on its multiprocessor and computes a run of *units*: a row of 64 cells, every output channel
and parity. One warpgroup, the producer, loads rows of x, splits them, and puts them in a ring in shared
memory; two others, the consumers, take the units in turn: multiply, activate, store. While one multiplies,
the other does all else. A row is used by two units: as their cells' own row, and as the row below.

A unit whose values no scale fits (not finite, or too far apart) is computed in plain fp32 instead. The operation
"pre_gradient" is the same but for its end, where it stores the epilogue's gradient at the sums.
"""

from typing import NamedTuple

from numba import cuda, float32, int32, uint8
from numba.cuda import types

from numba_impl.backends.hopper import consume as consumer
from numba_impl.backends.hopper import produce as producer
from numba_impl.backends.hopper.layout import ALL_LANES, GROUP, STRIP, THREADS, WARPS, Config
from numba_impl.cuda import pipeline
from numba_impl.cuda.device import device
from numba_impl.cuda.kernel import Kernel, built
from numba_impl.cuda.pipeline import element
from numba_impl.cuda.ptx import barrier, copy, maths, memory


class Run(NamedTuple):
    """A block's units: of the strip that begins at ``cell`` the rows ``first`` to ``last``, counted over all images."""

    cell: int
    first: int
    last: int


@built
def build(config: Config, epilogue) -> Kernel:
    """The kernel for a configuration; image sizes and constants are its arguments.

    Arrays: x; packed, factors and x_map, of ``weights``; weight, bias; gy, for a pre_gradient alone; out. Ints: units and
    strips, of ``layout.grid``; (height, width, out_height, out_width).
    """
    AT, C_OUT = config.shared.places, config.out_channels
    weights = pipeline.stages(AT.weights, AT.loaded)
    stages = pipeline.stages(AT.stages, AT.staged)
    ring = pipeline.ring(AT.full, AT.empty, fillers=GROUP, uses=2 * WARPS)
    produce = producer.build(config, ring, stages)
    consume = consumer.build(config, epilogue, ring, weights)

    @device
    def start(shared, packed, sizes):
        """One thread's part, before the others go on."""
        ring.start(shared)
        stages.start(shared)
        weights.start(shared)
        barrier.mbarrier_init_fence()
        at, loaded = weights.expect(shared, weights.slot(0))
        copy.bulk(at, memory.global_address(packed), AT.weights.size, loaded)
        memory.store_shared(shared + AT.descriptor.at, int32, at >> 4)
        memory.store_shared(shared + AT.sizes.at, int32, sizes)

    @device
    def share(units, strips):
        """A block has one strip of all images, so that neighbours read and write whole rows together."""
        block, blocks = int32(cuda.blockIdx.x), maths.divide(int32(cuda.gridDim.x), strips)
        position = maths.divide(block, strips)
        cell = int32((block - position * strips) * STRIP)
        units_each = maths.divide(units, blocks)
        more = int32(units - units_each * blocks)  # blocks that take one unit more
        first = int32(units_each * position + min(position, more))
        return Run(cell, first, int32(first + units_each + int32(position < more)))

    def hopper(x, packed, factors, x_map, weight, bias, gy, out, units, strips, sizes, constants):
        shared = memory.shared_address(cuda.shared.array(0, uint8))
        thread = int32(cuda.threadIdx.x)
        if thread == 0:
            start(shared, packed, sizes)
        if thread < C_OUT:
            memory.store_shared(element(shared, AT.channels, thread), float32, (factors[thread], bias[thread]))
        cuda.syncthreads()
        run = share(units, strips)
        # By a shuffle, so that the compiler knows that it is the same for a warp.
        group = cuda.shfl_sync(ALL_LANES, thread // GROUP, 0)
        if group == 0:
            produce(shared, x, x_map, thread, run, sizes)
        else:
            consume(shared, x, weight, bias, gy, out, int32(thread % GROUP), int32(group - 1), run, sizes, constants)

    f, i, word = (types.CPointer(kind) for kind in (types.float32, types.int32, types.int64))
    gy = types.UniTuple(f, int(config.operation == "pre_gradient"))
    numbers = types.int32, types.int32, types.UniTuple(types.int32, 4), types.UniTuple(types.float32, len(epilogue.parameters))
    signature = types.void(f, i, f, word, f, f, gy, f, *numbers)
    return Kernel(hopper, signature, THREADS, 1, config=epilogue.config(config), shared_bytes=config.shared.bytes)
