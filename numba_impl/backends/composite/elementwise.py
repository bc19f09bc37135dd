"""An epilogue alone, or its gradient in place, over any number of values in the order of memory: as fast as a copy.

Grid-stride over 16-byte vectors; what alignment leaves over at either end goes one value at a time.
"""

import math

from numba import cuda, int64
from numba.cuda import types

from numba_impl import gpu
from numba_impl.cuda import values
from numba_impl.cuda.device import device, each
from numba_impl.cuda.kernel import Kernel, built
from numba_impl.cuda.ptx import maths, memory
from numba_impl.epilogue import Epilogue, Operations

THREADS = 256
BLOCKS = 1024  # the most that a multiprocessor is given, one after another
OPERATIONS = Operations(device, maths.exp2, maths.reciprocal, maths.minimum, maths.maximum)


@built
def build(operation, epilogue: Epilogue, dtype) -> Kernel:
    """The kernel of ``prepare``'s function: each value of the target becomes ``value(source's, target's, constants)``."""
    element, _, widen, narrow, _ = values.of(dtype)
    VECTOR = values.of(dtype).vector
    if operation == "activate":
        activate = epilogue.build_forward(OPERATIONS)

        @device
        def value(z, _, constants):
            return narrow(activate(widen(z), constants))
    else:
        gradient = epilogue.build_gradient(OPERATIONS)

        @device
        def value(gy, z, constants):
            return narrow(gradient(widen(z), widen(gy), constants))

    each_value = each(value)

    @device
    def one(i, source, target, constants):
        target[i] = value(source[i], target[i], constants)

    @device
    def vector(i, source, target, constants):
        before = memory.load(target, i, VECTOR)  # the compiler drops it where it is not used
        memory.store(target, i, each_value(memory.load(source, i, VECTOR), before, constants))

    def elementwise(source, target, size, first, end, constants):
        thread = int64(cuda.blockIdx.x) * cuda.blockDim.x + cuda.threadIdx.x
        threads = int64(cuda.gridDim.x) * cuda.blockDim.x
        for i in range(first + VECTOR * thread, end, VECTOR * threads):
            vector(i, source, target, constants)
        for i in range(thread, first, threads):
            one(i, source, target, constants)
        for i in range(end + thread, size, threads):
            one(i, source, target, constants)

    pointer, i, constants = types.CPointer(element), types.int64, types.UniTuple(types.float32, len(epilogue.parameters))
    config = epilogue.config(operation, str(dtype))
    return Kernel(elementwise, types.void(pointer, pointer, i, i, i, constants), THREADS, 1, config)


def prepare(operation, epilogue: Epilogue, device, shape, dtype):
    """A function ``(source, target, constants)`` of dense tensors of this shape and dtype and equal strides.

    It returns the target. "activate": the source is z, the target, which may be the same memory, becomes the epilogue of it.
    "pre_gradient": the source is gy, a gradient at the epilogue's output; the target is z, and becomes the gradient at z.
    """
    size, vector = math.prod(shape), values.of(dtype).vector
    blocks = max(1, min(-(-size // (vector * THREADS)), BLOCKS * gpu.of(device).multiprocessors))
    launch = build(operation, epilogue, dtype).prepare(device, blocks, size)

    def run(source, target, constants):
        if size:
            launch((source, target), vector_range(size, vector, source.data_ptr(), target.data_ptr()), constants)
        return target

    return run


def vector_range(size, vector, source, target):
    """[first, end) of ``size`` values that accesses of ``vector`` of them, 16 bytes, can cover at two addresses.

    Empty where those are misaligned differently.
    """
    if (source - target) % 16:
        return size, size
    first = min(-source % 16 * vector // 16, size)
    return first, first + (size - first) // vector * vector
