"""Every PTX instruction that Numba does not offer, one small primitive each.

A primitive is a plain Python function that says what the instruction means, under a decorator that
says how to emit it. Compiled, the emitted instruction stands; in Numba's simulator, the Python runs.
"""

import numpy as np

from numba_impl.kernels.device import SIMULATED

if not SIMULATED:
    from llvmlite import ir
    from numba.cuda import types
    from numba.cuda.extending import intrinsic

    F32, I32, I64 = ir.FloatType(), ir.IntType(32), ir.IntType(64)
    VEC4 = ir.VectorType(F32, 4)
    TUPLE4 = types.UniTuple(types.float32, 4)


def emits(typer):
    """Decorator: compile calls through ``typer`` (an intrinsic's function), simulate them in Python."""

    def choose(meaning):
        if SIMULATED:
            return meaning
        typer.__name__, typer.__doc__ = meaning.__name__, meaning.__doc__
        return intrinsic(typer)

    return choose


def _data(context, builder, array_type, array):
    """Pointer to the first element of a pointer or a flat array."""
    if isinstance(array_type, types.CPointer):
        return array
    return context.make_array(array_type)(context, builder, array).data


def _element(context, builder, array_type, array, index_type, index):
    """Pointer to an element, with no wrap-around check."""
    return builder.gep(_data(context, builder, array_type, array), [context.cast(builder, index, index_type, types.int64)])


def _asm(builder, result, text, constraints, args=()):
    signature = ir.FunctionType(result, [a.type for a in args])
    return builder.call(ir.InlineAsm(signature, text, constraints, side_effect="memory" in constraints), args)


def _load(typingctx, array, index):
    def codegen(context, builder, sig, args):
        return builder.load(_element(context, builder, sig.args[0], args[0], sig.args[1], args[1]))

    return types.float32(array, index), codegen


@emits(_load)
def load(array, index):
    """ld.f32: one fp32 of a flat array; Numba's own indexing spends two instructions on negative indices."""
    return array[index]


def _load4(typingctx, array, index):
    def codegen(context, builder, sig, args):
        pointer = _element(context, builder, sig.args[0], args[0], sig.args[1], args[1])
        pointer = builder.bitcast(pointer, VEC4.as_pointer(pointer.type.addrspace))
        vector = builder.load(pointer, align=16)
        values = [builder.extract_element(vector, I32(i)) for i in range(4)]
        return context.make_tuple(builder, TUPLE4, values)

    return TUPLE4(array, index), codegen


@emits(_load4)
def load4(array, index):
    """ld.v4.f32: the four fp32 from ``index`` of a flat array, 16-byte aligned."""
    return array[index], array[index + 1], array[index + 2], array[index + 3]


def _store4(typingctx, array, index, a, b, c, d):
    def codegen(context, builder, sig, args):
        pointer = _element(context, builder, sig.args[0], args[0], sig.args[1], args[1])
        pointer = builder.bitcast(pointer, VEC4.as_pointer(pointer.type.addrspace))
        vector = ir.Constant(VEC4, ir.Undefined)
        for i, value in enumerate(args[2:]):
            vector = builder.insert_element(vector, value, I32(i))
        builder.store(vector, pointer, align=16)
        return context.get_dummy_value()

    f = types.float32
    return types.void(array, index, f, f, f, f), codegen


@emits(_store4)
def store4(array, index, a, b, c, d):
    """st.v4.f32: four fp32 to ``index`` of a flat array, 16-byte aligned."""
    array[index], array[index + 1], array[index + 2], array[index + 3] = a, b, c, d


def _shared_address(builder, pointer):
    """32-bit address in shared memory; opaque, so that it is computed once and not at every use."""
    text = "{ .reg .u64 t; cvta.to.shared.u64 t, $1; cvt.u32.u64 $0, t; }"
    return _asm(builder, I32, text, "=r,l", [builder.ptrtoint(pointer, I64)])


def _copy_async(context, builder, sig, args, instruction, operands=()):
    """Emit a cp.async from ``source[base + offset]`` to ``shared[to]``; the first five arguments of both primitives."""
    shared, to, source, base, offset = (
        context.cast(builder, value, kind, types.int64)
        if isinstance(kind, types.Integer)
        else _data(context, builder, kind, value)
        for value, kind in zip(args[:5], sig.args)
    )
    four = I64(4)
    target = builder.add(_shared_address(builder, shared), builder.trunc(builder.mul(to, four), I32))
    origin = builder.add(builder.ptrtoint(source, I64), builder.mul(base, four))
    origin = builder.add(origin, builder.mul(offset, four))
    constraints = "r,l" + ",r" * len(operands) + ",~{memory}"
    _asm(builder, ir.VoidType(), instruction, constraints, [target, origin, *operands])
    return context.get_dummy_value()


def _copy_async_4_bytes(typingctx, shared, to, source, base, offset, keep):
    text = "{ .reg .pred p; setp.eq.b32 p, $2, 0; cp.async.ca.shared.global [$0], [$1], 4, p; }"

    def codegen(context, builder, sig, args):
        return _copy_async(context, builder, sig, args, text, [builder.zext(args[5], I32)])

    return types.void(shared, to, source, base, offset, types.boolean), codegen


@emits(_copy_async_4_bytes)
def copy_async(shared, to, source, base, offset, keep):
    """cp.async.ca (sm_80), 4 bytes: fp32 ``source[base + offset]`` to ``shared[to]``, or zero where ``keep`` is false.

    ``base`` is the same for many copies and kept apart from ``offset``, so that the sum is one instruction.
    """
    shared[to] = source[base + offset] if keep else np.float32(0)


def _copy_async_16_bytes(typingctx, shared, to, source, base, offset):
    def codegen(context, builder, sig, args):
        return _copy_async(context, builder, sig, args, "cp.async.cg.shared.global [$0], [$1], 16;")

    return types.void(shared, to, source, base, offset), codegen


@emits(_copy_async_16_bytes)
def copy_async4(shared, to, source, base, offset):
    """cp.async.cg (sm_80), 16 bytes, aligned: the four fp32 from ``source[base + offset]`` to ``shared[to]``."""
    for i in range(4):
        shared[to + i] = source[base + offset + i]


def _wait(typingctx):
    def codegen(context, builder, sig, args):
        _asm(builder, ir.VoidType(), "cp.async.wait_all;", "~{memory}")
        return context.get_dummy_value()

    return types.void(), codegen


@emits(_wait)
def copy_wait():
    """cp.async.wait_all: this thread's copies have arrived (the simulator's always have)."""


def _arithmetic(text, operands=1):
    """Typer of an instruction from ``operands`` fp32 to one."""
    constraints = ",".join(["=f"] + ["f"] * operands)

    def codegen(context, builder, sig, args):
        return _asm(builder, F32, text, constraints, args)

    def typer1(typingctx, x):
        return types.float32(types.float32), codegen

    def typer2(typingctx, x, y):
        return types.float32(types.float32, types.float32), codegen

    return typer1 if operands == 1 else typer2


@emits(_arithmetic("ex2.approx.ftz.f32 $0, $1;"))
def exp2(x):
    """ex2.approx.ftz.f32: 2^x, largest relative error 2^-22; -inf gives 0."""
    return np.exp2(np.float32(x))


@emits(_arithmetic("rcp.approx.ftz.f32 $0, $1;"))
def reciprocal(x):
    """rcp.approx.ftz.f32: 1/x, largest error 1 ulp."""
    return np.float32(1) / np.float32(x)


@emits(_arithmetic("max.NaN.f32 $0, $1, $2;", 2))
def maximum(x, y):
    """max.NaN.f32 (sm_80): the larger, NaN if either is; the plain max drops NaN."""
    return np.maximum(x, y)


@emits(_arithmetic("min.NaN.f32 $0, $1, $2;", 2))
def minimum(x, y):
    """min.NaN.f32 (sm_80): the smaller, NaN if either is."""
    return np.minimum(x, y)
