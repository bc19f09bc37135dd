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
    from numba.cuda import cgutils, types
    from numba.cuda.extending import intrinsic

    device = functools.partial(cuda.jit, device=True, forceinline=True)


def compiled_by(typer, name, parameters):
    """The Numba intrinsic of ``typer(typing context, *types)``, with that name and those ``inspect.Parameter``."""
    typer.__name__, typer.__signature__ = name, inspect.Signature([_positional("typingctx"), *parameters])
    return intrinsic(typer)


def _positional(name):
    return inspect.Parameter(name, inspect.Parameter.POSITIONAL_ONLY)


def each(body):
    """A device function of two tuples of one length and other arguments: the tuple of ``body(a, b, *others)`` of their pairs."""
    if SIMULATED:
        return lambda first, second, *others: tuple(body(a, b, *others) for a, b in zip(first, second, strict=True))

    def typer(typingctx, first, second, *others):
        signature = typingctx.resolve_value_type(body).get_call_type(typingctx, (first.dtype, second.dtype, *others), {})
        result = types.UniTuple(signature.return_type, len(first))

        def codegen(context, builder, _, values):
            function = context.get_function(typingctx.resolve_value_type(body), signature)
            pairs = zip(*(cgutils.unpack_tuple(builder, value) for value in values[:2]), strict=True)
            return context.make_tuple(builder, result, [function(builder, [*pair, *values[2:]]) for pair in pairs])

        return result(first, second, *others), codegen

    _, _, *others = inspect.signature(body.py_func).parameters.values()
    return compiled_by(typer, body.__name__, [*map(_positional, ("first", "second")), *others])


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
