"""An epilogue alone, or its gradient in place, over any number of fp32 values in the order of memory: as fast as a copy.

Grid-stride over 16-byte vectors; what alignment leaves over at either end goes one value at a time.
"""

import math

from numba import cuda, int64
from numba.cuda import types

from numba_impl import gpu
from numba_impl.cuda.device import device
from numba_impl.cuda.kernel import Kernel, built
from numba_impl.cuda.ptx import maths, memory
from numba_impl.epilogue import Epilogue, Operations

THREADS = 256
BLOCKS = 1024  # the most that a multiprocessor is given, one after another
OPERATIONS = Operations(device, maths.exp2, maths.reciprocal, maths.minimum, maths.maximum)


@built
def build(operation, epilogue: Epilogue) -> Kernel:
    """The kernel of ``prepare``'s function: each value of the target becomes ``value(source's, target's, constants)``."""
    if operation == "activate":
        activate = epilogue.build_forward(OPERATIONS)

        @device
        def value(z, _, constants):
            return activate(z, constants)
    else:
        gradient = epilogue.build_gradient(OPERATIONS)

        @device
        def value(gy, z, constants):
            return gradient(z, gy, constants)

    @device
    def one(i, source, target, constants):
        target[i] = value(source[i], target[i], constants)

    @device
    def four(i, source, target, constants):
        a, b, c, d = memory.load(source, i, 4)
        e, f, g, h = memory.load(target, i, 4)  # the compiler drops it where it is not used
        a, b, c, d = value(a, e, constants), value(b, f, constants), value(c, g, constants), value(d, h, constants)
        memory.store(target, i, (a, b, c, d))

    def elementwise(source, target, size, first, end, constants):
        thread = int64(cuda.blockIdx.x) * cuda.blockDim.x + cuda.threadIdx.x
        threads = int64(cuda.gridDim.x) * cuda.blockDim.x
        for i in range(first + 4 * thread, end, 4 * threads):
            four(i, source, target, constants)
        for i in range(thread, first, threads):
            one(i, source, target, constants)
        for i in range(end + thread, size, threads):
            one(i, source, target, constants)

    pointer, i, constants = types.CPointer(types.float32), types.int64, types.UniTuple(types.float32, len(epilogue.parameters))
    return Kernel(elementwise, types.void(pointer, pointer, i, i, i, constants), THREADS, 1, epilogue.config(operation))


def prepare(operation, epilogue: Epilogue, device, shape):
    """A function ``(source, target, constants)`` of dense tensors of this shape and equal strides, which returns the target.

    "activate": the source is z, the target, which may be the same memory, becomes the epilogue of it. "pre_gradient": the
    source is gy, a gradient at the epilogue's output; the target is z, and becomes the gradient at z.
    """
    size = math.prod(shape)
    blocks = max(1, min(-(-size // (4 * THREADS)), BLOCKS * gpu.of(device).multiprocessors))
    launch = build(operation, epilogue).prepare(device, blocks, size)

    def run(source, target, constants):
        if size:
            launch((source, target), vector_range(size, source.data_ptr(), target.data_ptr()), constants)
        return target

    return run


def vector_range(size, source, target):
    """[first, end) that 16-byte accesses to two addresses can cover; empty where they are misaligned differently."""
    if (source - target) % 16:
        return size, size
    first = min(-source % 16 // 4, size)
    return first, first + (size - first) // 4 * 4
