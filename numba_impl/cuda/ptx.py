"""Every PTX instruction that Numba does not offer, one small primitive each.

A primitive is a plain Python function that says what the instruction means, under a decorator that
says how to emit it. Compiled, the emitted instruction stands; in Numba's simulator, the Python runs.
"""

import numpy as np

from numba_impl.cuda.device import SIMULATED

if not SIMULATED:
    from llvmlite import ir
    from numba.cuda import cgutils, types
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


def data(context, builder, array_type, array):
    """Pointer to the first element of a pointer or a flat array."""
    if isinstance(array_type, types.CPointer):
        return array
    return context.make_array(array_type)(context, builder, array).data


def _element(context, builder, array_type, array, index_type, index):
    """Pointer to an element, with no wrap-around check."""
    return builder.gep(data(context, builder, array_type, array), [context.cast(builder, index, index_type, types.int64)])


def asm(builder, result, text, constraints, args=()):
    signature = ir.FunctionType(result, [a.type for a in args])
    return builder.call(ir.InlineAsm(signature, text, constraints, side_effect="memory" in constraints), args)


def _instruction(text, operands="", result="", memory=True):
    """Typer of an instruction: a letter for each operand and result, r an int32, l an int64, f an fp32.

    ``memory`` says that it is to stay where it stands among the accesses to memory.
    """

    def typer(typingctx, *args):
        numba_types = {"r": types.int32, "l": types.int64, "f": types.float32}
        llvm_types = {"r": I32, "l": I64, "f": F32}
        results = [numba_types[letter] for letter in result]
        returned = results[0] if len(results) == 1 else types.UniTuple(results[0], len(results)) if results else types.void

        def codegen(context, builder, sig, packed):
            values = cgutils.unpack_tuple(builder, packed[0], len(args))
            values = [context.cast(builder, v, t, numba_types[k]) for v, t, k in zip(values, args, operands, strict=True)]
            constraints = ",".join([f"={letter}" for letter in result] + list(operands) + ["~{memory}"] * memory)
            llvm = [llvm_types[letter] for letter in result]
            kind = ir.VoidType() if not llvm else llvm[0] if len(llvm) == 1 else ir.LiteralStructType(llvm)
            found = asm(builder, kind, text, constraints, values)
            if len(llvm) > 1:
                return context.make_tuple(builder, returned, cgutils.unpack_tuple(builder, found, len(llvm)))
            return found if llvm else context.get_dummy_value()

        return returned(types.StarArgTuple.from_types(args)), codegen

    return typer


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
    return asm(builder, I32, text, "=r,l", [builder.ptrtoint(pointer, I64)])


def _copy_async(context, builder, sig, args, instruction, operands=()):
    """Emit a cp.async from ``source[base + offset]`` to ``shared[to]``; the first five arguments of both primitives."""
    shared, to, source, base, offset = (
        context.cast(builder, value, kind, types.int64)
        if isinstance(kind, types.Integer)
        else data(context, builder, kind, value)
        for value, kind in zip(args[:5], sig.args)
    )
    four = I64(4)
    target = builder.add(_shared_address(builder, shared), builder.trunc(builder.mul(to, four), I32))
    origin = builder.add(builder.ptrtoint(source, I64), builder.mul(base, four))
    origin = builder.add(origin, builder.mul(offset, four))
    constraints = "r,l" + ",r" * len(operands) + ",~{memory}"
    asm(builder, ir.VoidType(), instruction, constraints, [target, origin, *operands])
    return context.get_dummy_value()


def _copy_async_or_zero(instruction):
    text = f"{{ .reg .pred p; setp.eq.b32 p, $2, 0; {instruction}, p; }}"

    def typer(typingctx, shared, to, source, base, offset, keep):
        def codegen(context, builder, sig, args):
            return _copy_async(context, builder, sig, args, text, [builder.zext(args[5], I32)])

        return types.void(shared, to, source, base, offset, types.boolean), codegen

    return typer


@emits(_copy_async_or_zero("cp.async.ca.shared.global [$0], [$1], 4"))
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


@emits(_copy_async_or_zero("cp.async.cg.shared.global [$0], [$1], 16"))
def copy_async4_or_zero(shared, to, source, base, offset, keep):
    """``copy_async4``, or four zeros where ``keep`` is false."""
    for i in range(4):
        shared[to + i] = source[base + offset + i] if keep else np.float32(0)


@emits(_instruction("cp.async.wait_all;"))
def copy_wait():
    """cp.async.wait_all: this thread's copies have arrived (the simulator's always have)."""


@emits(_instruction("ex2.approx.ftz.f32 $0, $1;", "f", "f", memory=False))
def exp2(x):
    """ex2.approx.ftz.f32: 2^x, largest relative error 2^-22; -inf gives 0."""
    return np.exp2(np.float32(x))


@emits(_instruction("rcp.approx.ftz.f32 $0, $1;", "f", "f", memory=False))
def reciprocal(x):
    """rcp.approx.ftz.f32: 1/x, largest error 1 ulp."""
    return np.float32(1) / np.float32(x)


@emits(_instruction("max.NaN.f32 $0, $1, $2;", "ff", "f", memory=False))
def maximum(x, y):
    """max.NaN.f32 (sm_80): the larger, NaN if either is; the plain max drops NaN."""
    return np.maximum(x, y)


@emits(_instruction("min.NaN.f32 $0, $1, $2;", "ff", "f", memory=False))
def minimum(x, y):
    """min.NaN.f32 (sm_80): the smaller, NaN if either is."""
    return np.minimum(x, y)


@emits(_instruction("mov.b32 $0, $1;", "f", "r", memory=False))
def bits(x):
    """mov.b32: the bits of an fp32 as an int32; those of numbers that are not negative are ordered as they are."""
    return np.float32(x).view(np.int32)


@emits(_instruction("mov.b32 $0, $1;", "r", "f", memory=False))
def from_bits(i):
    """mov.b32: the fp32 of these bits."""
    return np.int32(i).view(np.float32)


_SPLIT = """{
.reg .b16 a, b, c, d;
.reg .f32 x, y;
cvt.rn.f16x2.f32 $0, $3, $2;
mov.b32 {a, b}, $0;
cvt.f32.f16 x, a;
cvt.f32.f16 y, b;
sub.f32 x, $2, x;
sub.f32 y, $3, y;
cvt.rn.f16x2.f32 $1, y, x;
}"""


@emits(_instruction(_SPLIT, "ff", "rr", memory=False))
def split_half2(x, y):
    """cvt.rn.f16x2.f32 (sm_80), twice: two fp32 as fp16 hi and as fp16 lo = x - hi, each a pair with x in the low half.

    hi + lo is x to 22 bits while |x| is in [2^-3, 65504]; below, to within 2^-25.
    """
    values = np.array([x, y], np.float32)
    high = values.astype(np.float16)
    low = (values - high.astype(np.float32)).astype(np.float16)
    return high.view(np.int32)[0], low.view(np.int32)[0]


@emits(_instruction("cvt.rn.f16x2.f32 $0, $2, $1;", "ff", "r", memory=False))
def half2(x, y):
    """cvt.rn.f16x2.f32 (sm_80): two fp32 rounded to fp16, x in the low half."""
    return np.array([x, y], np.float16).view(np.int32)[0]


@emits(_instruction("div.u32 $0, $1, $2;", "rr", "r", memory=False))
def divide(a, b):
    """div.u32: a // b of int32 that are not negative; Numba divides in 64 bits, ten times the instructions."""
    return a // b


# What follows serves the Hopper kernel alone, which the simulator cannot run. Addresses in shared memory are int32.


def _address(typingctx, array):
    def codegen(context, builder, sig, args):
        return _shared_address(builder, data(context, builder, sig.args[0], args[0]))

    return types.int32(array), codegen


@emits(_address)
def shared_address(array):
    """cvta.to.shared.u64: the address in shared memory of an array's first byte."""


def _global_address(typingctx, pointer):
    def codegen(context, builder, sig, args):
        return builder.ptrtoint(args[0], I64)

    return types.int64(pointer), codegen


@emits(_global_address)
def global_address(pointer):
    """The address of a pointer to global memory, an int64."""


_LOAD = "{ .reg .pred p; setp.ne.b32 p, $2, 0; mov.f32 $0, 0f00000000; @p ld.global.nc.f32 $0, [$1]; }"


@emits(_instruction(_LOAD, "lr", "f"))
def load_or_zero(address, keep):
    """ld.global.nc.f32: the fp32 at a global address, or 0 where ``keep`` is 0, without an access."""


_LOAD4 = """{
.reg .pred p;
setp.ne.b32 p, $5, 0;
mov.f32 $0, 0f00000000;
mov.f32 $1, 0f00000000;
mov.f32 $2, 0f00000000;
mov.f32 $3, 0f00000000;
@p ld.global.nc.v4.f32 {$0, $1, $2, $3}, [$4];
}"""


@emits(_instruction(_LOAD4, "lr", "ffff", memory=False))
def load4_or_zero(address, keep):
    """ld.global.nc.v4.f32: four fp32, 16-byte aligned, of memory that nobody writes meanwhile; so it may be moved."""


@emits(_instruction("ld.shared.v2.f32 {$0, $1}, [$2];", "r", "ff"))
def load_shared2(address):
    """ld.shared.v2.f32: two fp32, 8-byte aligned."""


@emits(_instruction("ld.shared.v2.b32 {$0, $1}, [$2];", "r", "rr"))
def load_shared2_bits(address):
    """ld.shared.v2.b32: two int32, 8-byte aligned."""


@emits(_instruction("ld.shared.f32 $0, [$1];", "r", "f"))
def load_shared(address):
    """ld.shared.f32."""


_LOAD_SHARED = "{ .reg .pred p; setp.ne.b32 p, $2, 0; mov.f32 $0, 0f00000000; @p ld.shared.f32 $0, [$1]; }"


@emits(_instruction(_LOAD_SHARED, "rr", "f"))
def load_shared_or_zero(address, keep):
    """ld.shared.f32, or 0 where ``keep`` is 0, without an access."""


@emits(_instruction("ld.volatile.shared.b32 $0, [$1];", "r", "r"))
def load_shared_anew(address):
    """ld.volatile.shared.b32: an int32 that the compiler takes to be another one each time."""


@emits(_instruction("st.shared.v2.f32 [$0], {$1, $2};", "rff"))
def store_shared2(address, a, b):
    """st.shared.v2.f32, 8-byte aligned."""


@emits(_instruction("st.shared.v2.b32 [$0], {$1, $2};", "rrr"))
def store_shared2_bits(address, a, b):
    """st.shared.v2.b32, 8-byte aligned."""


@emits(_instruction("st.shared.f32 [$0], $1;", "rf"))
def store_shared(address, a):
    """st.shared.f32."""


@emits(_instruction("st.shared.b32 [$0], $1;", "rr"))
def store_shared_bits(address, a):
    """st.shared.b32."""


@emits(_instruction("st.shared.v4.b32 [$0], {$1, $2, $3, $4};", "rrrrr"))
def store_shared4_bits(address, a, b, c, d):
    """st.shared.v4.b32, 16-byte aligned."""


def _stream(vector, count):
    """Text of a streaming store of ``count`` fp32 to $0 where the last operand is not 0."""
    values = ", ".join(f"${i + 1}" for i in range(count))
    return f"{{ .reg .pred p; setp.ne.b32 p, ${count + 1}, 0; @p st.global.cs{vector}.f32 [$0], {{{values}}}; }}"


@emits(_instruction(_stream(".v4", 4), "lffffr"))
def stream4(address, a, b, c, d, keep):
    """st.global.cs.v4.f32: four fp32 that are not read again soon, 16-byte aligned, where ``keep`` is not 0."""


@emits(_instruction(_stream(".v2", 2), "lffr"))
def stream2(address, a, b, keep):
    """st.global.cs.v2.f32: two, 8-byte aligned."""


@emits(_instruction(_stream("", 1), "lfr"))
def stream(address, a, keep):
    """st.global.cs.f32: one."""


@emits(_instruction("redux.sync.max.s32 $0, $1, 0xffffffff;", "r", "r"))
def warp_max(value):
    """redux.sync.max.s32 (sm_80): the largest int32 of the warp's 32 threads."""


@emits(_instruction("redux.sync.min.s32 $0, $1, 0xffffffff;", "r", "r"))
def warp_min(value):
    """redux.sync.min.s32 (sm_80): the smallest int32 of the warp's 32 threads."""


@emits(_instruction("bar.sync $0, $1;", "rr"))
def barrier_sync(barrier, count):
    """bar.sync: arrive at a named barrier of the block (0 is syncthreads) and wait for ``count`` threads, whole warps."""


@emits(_instruction("bar.arrive $0, $1;", "rr"))
def barrier_arrive(barrier, count):
    """bar.arrive: arrive at a named barrier without waiting."""


@emits(_instruction("mbarrier.init.shared::cta.b64 [$0], $1;", "rr"))
def mbarrier_init(barrier, count):
    """mbarrier.init (sm_80): a phase ends when ``count`` arrivals came and all expected bytes."""


@emits(_instruction("fence.mbarrier_init.release.cluster;"))
def mbarrier_init_fence():
    """fence.mbarrier_init (sm_90): initialised barriers are seen by the bulk copy engine."""


@emits(_instruction("mbarrier.arrive.shared::cta.b64 _, [$0];", "r"))
def mbarrier_arrive(barrier):
    """mbarrier.arrive (sm_80): this thread's accesses so far are done."""


@emits(_instruction("mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $1;", "rr"))
def mbarrier_arrive_expect(barrier, size):
    """mbarrier.arrive.expect_tx (sm_90): arrive, and let the phase wait for ``size`` bytes besides."""


_WAIT = """{
.reg .pred p;
AGAIN:
mbarrier.try_wait.parity.shared::cta.b64 p, [$0], $1;
@!p bra AGAIN;
}"""


@emits(_instruction(_WAIT, "rr"))
def mbarrier_wait(barrier, parity):
    """mbarrier.try_wait.parity (sm_90): until the phase of that parity has ended."""


_BULK_COPY = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [$0], [$1], $2, [$3];"


@emits(_instruction(_BULK_COPY, "rlrr"))
def bulk_copy(shared, source, size, barrier):
    """cp.async.bulk (sm_90): ``size`` bytes from a global to a shared address, both multiples of 16; ``barrier`` counts them."""


_BULK_COPY_TENSOR = (
    "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [$0], [$1, {$2, $3, $4, $5}], [$6];"
)


@emits(_instruction(_BULK_COPY_TENSOR, "rlrrrrr"))
def bulk_copy_box(shared, tensor_map, x, y, z, w, barrier):
    """cp.async.bulk.tensor.4d (sm_90): the box at (x, y, z, w), x innermost, of the tensor that a map describes.

    To a shared address, a multiple of 128; outside of the tensor are zeros, and all are counted by ``barrier``. No coordinate
    may be negative: (-3, -1, 0, 0) was an illegal instruction on an H200.
    """


@emits(_instruction("fence.proxy.tensormap::generic.acquire.gpu [$0], 128;", "l"))
def tensor_map_fence(tensor_map):
    """fence.proxy.tensormap (sm_90): a map that an earlier kernel wrote is seen by the bulk copy engine."""


def set_registers(count, more):
    """setmaxnreg (sm_90a): a primitive that gives its warpgroup's threads ``count`` registers, ``more`` or fewer than before."""

    @emits(_instruction(f"setmaxnreg.{'inc' if more else 'dec'}.sync.aligned.u32 {count};"))
    def setmaxnreg():
        """setmaxnreg (sm_90a)."""

    return setmaxnreg


def emit_wgmma(builder, columns, sums, fragment, descriptor, accumulate):
    """Emit wgmma.mma_async.m64nNk16 (sm_90a): D[64, N] (+)= A[64, 16] B[16, N], fp16 in, fp32 out; the new sums.

    A in registers (``fragments.operand``), B in shared memory by a descriptor, D in N / 2 registers
    (``fragments.accumulator``).
    """
    n = columns // 2
    outputs, inputs = (", ".join(f"${i}" for i in r) for r in (range(n), range(2 * n, 2 * n + 4)))
    text = (
        f"{{ .reg .pred p; setp.ne.b32 p, {int(accumulate)}, 0; wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.f16.f16 "
        f"{{{outputs}}}, {{{inputs}}}, ${2 * n + 4}, p, 1, 1, 0; }}"
    )
    constraints = ",".join(["=f"] * n + [str(i) for i in range(n)] + ["r"] * 4 + ["l", "~{memory}"])
    result = asm(builder, ir.LiteralStructType([F32] * n), text, constraints, [*sums, *fragment, descriptor])
    return cgutils.unpack_tuple(builder, result, n)


def emit_fragment(builder, base, offset):
    """Emit ldmatrix.x4 (sm_75): A's fragment, fp16, in four registers; see ``fragments.loaded_row`` and ``operand``."""
    text = f"ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{$0, $1, $2, $3}}, [$4 + {offset}];"
    loaded = asm(builder, ir.LiteralStructType([I32] * 4), text, "=r,=r,=r,=r,r,~{memory}", [base])
    return cgutils.unpack_tuple(builder, loaded, 4)
