"""``ptx.emit``: what a primitive says where it is called with types that it does not take, and primitives made of others."""

import re

import pytest
from numba import float32, float64, int32
from numba.cuda import types

from numba_impl.cuda.kernel import Kernel
from numba_impl.cuda.ptx import barrier, copy, maths, memory
from numba_impl.cuda.ptx.emit import primitive
from tests.cuda.intrinsics import FLOATS, INTS, THREADS, check_instructions

DOUBLES, HALVES = types.CPointer(types.float64), types.CPointer(types.float16)

# Arguments of a function, the function, and what is said of it.
WRONG = {
    "an array of another width": (
        DOUBLES,
        lambda x: memory.load(x, 0),
        "load takes integers and floats of 2 or 4 bytes, got float64",
    ),
    "no array": (types.int32, lambda x: memory.load(x, 0), "load takes a pointer or a flat array, got int32"),
    "an index": (FLOATS, lambda x: memory.load(x, 0.5), "load takes an integer, got float64"),
    "a variable count": (
        FLOATS,
        lambda x: memory.load(x, 0, maths.bits(x[0])),
        "load takes a count that is a constant, got int32",
    ),
    "an odd count": (FLOATS, lambda x: memory.load(x, 0, 3), "load takes 1, 2, 4 or 8 values, 16 bytes at most, got 3 float32"),
    "too many bytes": (FLOATS, lambda x: memory.load(x, 0, 8), "load takes 1, 2, 4 or 8 values, 16 bytes at most, got 8 float32"),
    "too long a tuple": (
        HALVES,
        lambda x: memory.store(x, 0, (1, 2, 3)),
        "store takes 1, 2, 4 or 8 values, 16 bytes at most, got 3 float16",
    ),
    "a float as an integer": (INTS, lambda x: memory.store(x, 0, (1, 2.5)), "store takes an integer, got float64"),
    "no number": (FLOATS, lambda x: memory.store(x, 0, x), r"store takes a number, got float32\*"),
    "no dtype": (FLOATS, lambda x: memory.load_shared(0, x), r"load_shared takes a dtype, got float32\*"),
    "a dtype of another width": (
        FLOATS,
        lambda x: memory.store_shared(0, float64, x[0]),
        "store_shared takes integers and floats of 2 or 4 bytes, got float64",
    ),
    "too many arguments": (FLOATS, lambda x: memory.load_shared(0, float32, 2, 4), "load_shared too many positional arguments"),
    "a copy of 2 bytes": (HALVES, lambda x: copy.start(x, 0, x, 0, 0, 1), "start copies 4, 8 or 16 bytes, got 2"),
    "a copy of two dtypes": (
        (FLOATS, INTS),
        lambda x, y: copy.start(x, 0, y, 0, 0, 1),
        "start copies between arrays of one dtype, got float32 and int32",
    ),
    "an instruction's operand": (FLOATS, lambda x: maths.exp2(x), r"exp2 takes a number, got float32\*"),
    "an instruction's integer": (FLOATS, lambda x: barrier.sync(1, x[0]), "sync takes an integer, got float32"),
}


@pytest.mark.parametrize(("arguments", "function", "message"), WRONG.values(), ids=WRONG)
def test_wrong_types_are_refused(arguments, function, message, compiler):
    arguments = arguments if isinstance(arguments, tuple) else (arguments,)
    with pytest.raises(Exception) as caught:  # noqa: B017 - Numba's typing error, or numba-cuda's own, as their releases fit
        Kernel(function, types.void(*arguments), THREADS, 1).ptx((9, 0))
    assert "TypingError" in type(caught.value).__name__ or "TypeError" in type(caught.value).__name__
    assert re.search(message, re.sub(r"\x1b\[[0-9;]*m", "", str(caught.value))), caught.value  # less colours


def test_a_primitive_of_several_instructions(compiler):
    """A list is a tuple, and an operand may share the register of a result."""

    def describe(value):
        def emit(code, value):
            (shifted,) = code.asm("shl.b32 $0, $1, 3;", "r", "r", [value])
            (summed,) = code.asm("add.s32 $0, $0, $2;", "r", "0r", [shifted, code.add(value, 5)])
            return [shifted, summed]

        return types.UniTuple(types.int32, 2), (types.int32,), emit

    @primitive(describe)
    def several(value):
        """A tuple of two."""

    def function(x):
        x[0], x[1] = several(x[2])

    check_instructions(Kernel(function, types.void(INTS), THREADS, 1), ["shl.b32 %, %, 3;", "add.s32 %, %, %;"])
    assert several.__doc__ == "A tuple of two." and several.__name__ == "several"


def test_a_dtype_may_be_a_variable_of_the_enclosing_function(compiler):
    def build(dtype, count):
        def function(x, y):
            memory.store(y, 0, memory.load_shared(memory.shared_address(x), dtype, count))

        return Kernel(function, types.void(types.CPointer(dtype), types.CPointer(dtype)), THREADS, 1)

    check_instructions(build(int32, 2), ["ld.shared.v2.b32 {%, %}, [%];"])
    check_instructions(build(float32, 4), ["ld.shared.v4.f32 {%, %, %, %}, [%];"])
