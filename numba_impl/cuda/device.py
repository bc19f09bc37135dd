"""Device functions: inlined, and unrolled where every index must be known when the kernel is compiled.

A register is addressed by constants alone. LLVM unrolls a plain ``range`` only up to a size limit and
past it leaves an array of registers in local memory; ``unroll`` emits each call with a constant index.
"""

import functools

from numba import config, cuda

SIMULATED = bool(config.ENABLE_CUDASIM)

if SIMULATED:
    device = cuda.jit(device=True)
else:
    from llvmlite import ir
    from numba.cuda import cgutils, types
    from numba.cuda.extending import intrinsic

    device = functools.partial(cuda.jit, device=True, forceinline=True)


def unroll(count, body):
    """A device function of ``*args`` that calls the device function ``body(i, *args)`` for i = 0 ... count - 1."""
    if SIMULATED:
        return lambda *args: [body(i, *args) for i in range(count)]

    def typer(typingctx, *args):
        body_type = typingctx.resolve_value_type(body)
        signature = body_type.get_call_type(typingctx, (types.int32, *args), {})

        def codegen(context, builder, sig, packed):
            function = context.get_function(body_type, signature)
            values = cgutils.unpack_tuple(builder, packed[0], len(args))
            for i in range(count):
                function(builder, [ir.Constant(ir.IntType(32), i), *values])
            return context.get_dummy_value()

        return types.void(types.StarArgTuple.from_types(args)), codegen

    return intrinsic(typer)
