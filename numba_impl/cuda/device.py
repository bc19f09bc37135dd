"""Device functions: inlined, and unrolled where every index must be known when the kernel is compiled.

A register is addressed by constants alone. LLVM unrolls a plain ``range`` only up to a size limit and
past it leaves an array of registers in local memory; ``unroll`` emits each call with a constant index.
"""

import functools
import inspect

from numba import config, cuda

SIMULATED = bool(config.ENABLE_CUDASIM)

if SIMULATED:
    device = cuda.jit(device=True)
else:
    from numba.cuda import types
    from numba.cuda.extending import intrinsic

    device = functools.partial(cuda.jit, device=True, forceinline=True)


def compiled_by(typer, name, parameters):
    """The Numba intrinsic of ``typer(typing context, *types)``, with that name and those ``inspect.Parameter``."""
    context = inspect.Parameter("typingctx", inspect.Parameter.POSITIONAL_ONLY)
    typer.__name__, typer.__signature__ = name, inspect.Signature([context, *parameters])
    return intrinsic(typer)


def unroll(count, body):
    """A device function of the arguments of ``body`` but its first, i: it calls ``body`` for i = 0 ... count - 1."""
    if SIMULATED:
        return lambda *others: [body(i, *others) for i in range(count)]

    def typer(typingctx, *others):
        kind = typingctx.resolve_value_type(body)
        signature = kind.get_call_type(typingctx, (types.int32, *others), {})

        def codegen(context, builder, _, values):
            function = context.get_function(kind, signature)
            for i in range(count):
                function(builder, [context.get_constant(types.int32, i), *values])
            return context.get_dummy_value()

        return types.void(*others), codegen

    _, *parameters = inspect.signature(body.py_func).parameters.values()
    return compiled_by(typer, body.__name__, parameters)
