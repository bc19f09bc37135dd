"""How a primitive emits its instructions: all that the primitives need of LLVM and of Numba's extension interface.

A dtype, here, is a Numba number type of 2 or 4 bytes; bfloat16 goes as one of the integers. Registers have the letters of inline
assembly: h is 16 bits, r an int32, l an int64, f an fp32.
"""

import inspect

from numba.cuda import types

from numba_impl.cuda.device import SIMULATED, compiled_by

if not SIMULATED:
    from llvmlite import ir
    from numba.cuda import cgutils
    from numba.cuda.core.errors import NumbaTypeError

    LLVM = {"h": ir.IntType(16), "r": ir.IntType(32), "l": ir.IntType(64), "f": ir.FloatType()}

NUMBA = {"h": types.int16, "r": types.int32, "l": types.int64, "f": types.float32}


def primitive(describe):
    """Decorator: a function that Numba compiles by ``describe``; in the simulator the function itself runs.

    ``describe(*kinds)`` takes the Numba types of the arguments, None for one left to its default, and gives (type of the
    result, types to which the arguments are converted, emit). ``emit(code, *values)`` emits it into a ``Code`` and gives the
    result, a tuple as a list. Wrong types ``describe`` refuses by ``refuse``.
    """

    def choose(meaning):
        if SIMULATED:
            return meaning
        name, signature = meaning.__name__, inspect.signature(meaning)

        def typer(typingctx, *kinds, **named):
            try:
                arguments = signature.bind(*kinds, **named)
                arguments.apply_defaults()
                result, converted, emit = describe(*arguments.args)
            except (NumbaTypeError, TypeError) as error:
                raise NumbaTypeError(f"{name} {error}") from error

            def codegen(context, builder, _, values):
                found = emit(Code(context, builder), *values)
                if isinstance(found, list):
                    return context.make_tuple(builder, result, found)
                return context.get_dummy_value() if found is None else found

            return result(*[types.none if kind is None else kind for kind in converted]), codegen

        typer.__doc__ = meaning.__doc__
        return compiled_by(typer, name, signature.parameters.values())

    return choose


def instruction(text, operands="", result="", memory=True):
    """Decorator: the ``primitive`` of one instruction, with the letters of its operands and results; $0 is the first result.

    ``memory`` says that it is to stay where it stands among the accesses to memory.
    """

    def emit(code, *values):
        found = code.asm(text, result, operands, values, memory)
        return found if len(result) > 1 else found[0] if result else None

    def describe(*kinds):
        results = [NUMBA[letter] for letter in result]
        returned = results[0] if len(results) == 1 else types.UniTuple(results[0], len(results)) if results else types.void
        return returned, [operand(letter, kind) for letter, kind in zip(operands, kinds, strict=True)], emit

    return primitive(describe)


def refuse(reason):
    """Raise what Numba shows where a primitive is called with wrong types; the primitive's name comes before the reason."""
    raise NumbaTypeError(reason)


def operand(letter, kind):
    """The type to which an argument is converted for a register of that letter; refuses what is no such number."""
    if not isinstance(kind, (types.Integer, types.Boolean) + (types.Float,) * (letter == "f")):
        refuse(f"takes {'a number' if letter == 'f' else 'an integer'}, got {kind}")
    return NUMBA[letter]


def element_of(kind):
    """The type of the elements of a pointer or a flat array; refuses any other argument."""
    if not isinstance(kind, types.CPointer) and not (isinstance(kind, types.Array) and kind.ndim == 1):
        refuse(f"takes a pointer or a flat array, got {kind}")
    return kind.dtype


def dtype_of(kind):
    """The dtype that is handed over as an argument; refuses any other argument."""
    if not isinstance(kind, types.NumberClass):
        refuse(f"takes a dtype, got {kind}")
    return kind.instance_type


def loaded(dtype, count):
    """The ``Registers`` of a load, by the type of its argument ``count``: a constant, or left out."""
    if not isinstance(count, (types.IntegerLiteral, types.NoneType, type(None))):
        refuse(f"takes a count that is a constant, got {count}")
    return Registers(dtype, count.literal_value if isinstance(count, types.IntegerLiteral) else None)


def stored(dtype, values):
    """The ``Registers`` of a store, by the type of its argument ``values``: a number, or a tuple of them."""
    single = not isinstance(values, types.BaseTuple)
    registers = Registers(dtype, None if single else len(values))
    for value in [values] if single else values:
        operand("f" if isinstance(dtype, types.Float) else "r", value)
    return registers


class Registers:
    """The registers in which one access moves ``count`` neighbours, or a single value (None), of a dtype."""

    def __init__(self, dtype, count):
        if not isinstance(dtype, (types.Integer, types.Float)) or dtype.bitwidth not in (16, 32):
            refuse(f"takes integers and floats of 2 or 4 bytes, got {dtype}")
        self.dtype = dtype
        self.type = dtype if count is None else types.UniTuple(dtype, count)  # of the value, or of a tuple
        self.size = (1 if count is None else count) * dtype.bitwidth // 8  # bytes
        if count not in (None, 1, 2, 4, 8) or self.size > 16:
            refuse(f"takes 1, 2, 4 or 8 values, 16 bytes at most, got {count} {dtype}")
        self.paired = count == 8  # of 16 bits, as PTX moves four registers at most
        letter = "f" if dtype == types.float32 else "r" if dtype.bitwidth == 32 or self.paired else "h"
        self.letters = letter * (4 if self.paired else count or 1)

    def __len__(self):
        return len(self.letters)

    @property
    def ptx_type(self):
        """A register's type in PTX."""
        return {"h": "b16", "r": "b32", "f": "f32"}[self.letters[0]]

    @property
    def suffix(self):
        """What the instruction's name ends in."""
        return f".v{len(self)}.{self.ptx_type}" if len(self) > 1 else f".{self.ptx_type}"

    def names(self, first):
        """The operand of the instruction: $first and on."""
        names = ", ".join(f"${first + i}" for i in range(len(self)))
        return f"{{{names}}}" if len(self) > 1 else names

    def zeros(self):
        """Instructions that clear them, as the first results."""
        zero = "0f00000000" if self.ptx_type == "f32" else "0"
        return " ".join(f"mov.{self.ptx_type} ${i}, {zero};" for i in range(len(self)))

    def fill(self, code, found):
        """The list of registers for a value, or for a tuple."""
        values = code.unpack(found) if isinstance(self.type, types.UniTuple) else [found]
        return code.join(values) if self.paired else values

    def take(self, code, registers):
        """The value in the registers, or the list of a tuple's."""
        values = code.split(registers) if self.paired else registers
        return values if isinstance(self.type, types.UniTuple) else values[0]


class Code:
    """Where a primitive emits its instructions: into a kernel that is being compiled."""

    def __init__(self, context, builder):
        self.context, self.builder = context, builder

    def asm(self, text, results, operands, values, memory=True):
        """Emit PTX; gives the list of its results.

        ``results`` and ``operands`` are letters; an operand that shares the register of a result has its number instead.
        ``memory`` says that it is to stay where it stands among the accesses to memory.
        """
        constraints = ",".join([f"={letter}" for letter in results] + list(operands) + ["~{memory}"] * memory)
        kinds = [LLVM[letter] for letter in results]
        returned = ir.LiteralStructType(kinds) if len(kinds) > 1 else kinds[0] if kinds else ir.VoidType()
        function = ir.FunctionType(returned, [value.type for value in values])
        found = self.builder.call(ir.InlineAsm(function, text, constraints, side_effect=memory), values)
        return self.unpack(found) if len(kinds) > 1 else [found] * len(kinds)

    def unpack(self, values):
        """The list of a tuple's values."""
        return cgutils.unpack_tuple(self.builder, values)

    def constant(self, letter, number):
        return LLVM[letter](number)

    def undefined(self, letter):
        """What is in a register before anything is put there."""
        return ir.Constant(LLVM[letter], ir.Undefined)

    def add(self, value, other):
        """The sum of an integer and another one, or a Python int."""
        return self.builder.add(value, value.type(other) if isinstance(other, int) else other)

    def times(self, value, number):
        """The product of an integer and a Python int."""
        return self.builder.mul(value, value.type(number))

    def low(self, value):
        """The low half, an int32, of an int64."""
        return self.builder.trunc(value, LLVM["r"])

    def join(self, values):
        """Pairs of 16-bit values as int32, the first of each in the low half."""
        words = [self.builder.zext(value, LLVM["r"]) for value in values]
        return [self.builder.or_(low, self.builder.shl(high, LLVM["r"](16))) for low, high in zip(words[::2], words[1::2])]

    def split(self, words):
        """The 16-bit values of int32, the low half of each first."""
        shifted = [self.builder.lshr(word, LLVM["r"](by)) for word in words for by in (0, 16)]
        return [self.builder.trunc(value, LLVM["h"]) for value in shifted]

    def pointer(self, kind, array, index=None):
        """The pointer to a pointer's or a flat array's first element, or to that at an int64 index, which is not checked."""
        if isinstance(kind, types.Array):
            array = self.context.make_array(kind)(self.context, self.builder, array).data
        return array if index is None else self.builder.gep(array, [index])

    def address(self, pointer):
        """The address of a pointer, an int64."""
        return self.builder.ptrtoint(pointer, LLVM["l"])

    def shared_address(self, pointer):
        """The address of a pointer in shared memory, an int32; opaque, so that it is computed once and not at every use."""
        text = "{ .reg .u64 t; cvta.to.shared.u64 t, $1; cvt.u32.u64 $0, t; }"
        return self.asm(text, "r", "l", [self.address(pointer)], memory=False)[0]

    def load(self, pointer, letters):
        """The list of registers at a pointer, by one access; the pointer is a multiple of their bytes."""
        if len(letters) == 1:
            return [self.builder.load(pointer)]
        pointer, align = self._vector(pointer, LLVM[letters[0]], len(letters))
        vector = self.builder.load(pointer, align=align)
        return [self.builder.extract_element(vector, LLVM["r"](i)) for i in range(len(letters))]

    def store(self, pointer, registers):
        """Store registers at a pointer, by one access; the pointer is a multiple of their bytes."""
        if len(registers) == 1:
            self.builder.store(registers[0], pointer)
            return
        pointer, align = self._vector(pointer, registers[0].type, len(registers))
        vector = ir.Constant(pointer.type.pointee, ir.Undefined)
        for i, register in enumerate(registers):
            vector = self.builder.insert_element(vector, register, LLVM["r"](i))
        self.builder.store(vector, pointer, align=align)

    def _vector(self, pointer, element, count):
        """(the pointer as one to a vector, the vector's bytes)."""
        vector = ir.VectorType(element, count).as_pointer(pointer.type.addrspace)
        return self.builder.bitcast(pointer, vector), count * self.context.get_abi_sizeof(element)
