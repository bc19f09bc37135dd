"""Loads and stores: of flat arrays by index, of shared and global memory by address. The dtype gives the width.

``count`` neighbours, a constant, are one access and a tuple, at a multiple of their bytes: 1, 2, 4 or 8 values, 16 bytes
at most. Without ``count`` it is a single value. Addresses are in bytes: an int32 in shared memory, an int64 in global
memory; the simulator has none.
"""

from numba.cuda import types

from numba_impl.cuda.ptx.emit import dtype_of, element_of, loaded, operand, primitive, stored


def _load(array, index, count):
    registers = loaded(element_of(array), count)

    def emit(code, first, index, _):
        return registers.take(code, code.load(code.pointer(array, first, index), registers.letters))

    return registers.type, (array, operand("l", index), count), emit


@primitive(_load)
def load(array, index, count=None):
    """ld: ``array[index]``, or ``count`` values from there. Numba's own indexing spends two instructions on negative indices."""
    return array[index] if count is None else tuple(array[index + i] for i in range(count))


def _store(array, index, values):
    registers = stored(element_of(array), values)

    def emit(code, first, index, values):
        code.store(code.pointer(array, first, index), registers.fill(code, values))

    return types.void, (array, operand("l", index), registers.type), emit


@primitive(_store)
def store(array, index, values):
    """st: a value, or a tuple of them, to ``array[index]`` and on."""
    for i, value in enumerate(values if isinstance(values, tuple) else [values]):
        array[index + i] = value


def _shared_address(array):
    element_of(array)
    return types.int32, (array,), lambda code, first: code.shared_address(code.pointer(array, first))


@primitive(_shared_address)
def shared_address(array):
    """cvta.to.shared.u64: the address in shared memory of an array's first byte."""


def _global_address(array):
    element_of(array)
    return types.int64, (array,), lambda code, first: code.address(code.pointer(array, first))


@primitive(_global_address)
def global_address(array):
    """The address in global memory of an array's first byte."""


def _load_at(name, letter):
    """What ``primitive`` takes for a load from an address of that letter."""

    def describe(address, dtype, count):
        registers = loaded(dtype_of(dtype), count)
        text = f"{name}{registers.suffix} {registers.names(0)}, [${len(registers)}];"

        def emit(code, address, *_):
            return registers.take(code, code.asm(text, registers.letters, letter, [address]))

        return registers.type, (operand(letter, address), dtype, count), emit

    return describe


@primitive(_load_at("ld.shared", "r"))
def load_shared(address, dtype, count=None):
    """ld.shared."""


@primitive(_load_at("ld.volatile.shared", "r"))
def load_shared_anew(address, dtype, count=None):
    """ld.volatile.shared: what the compiler takes to be another value each time."""


def _load_or_zero_at(name, letter, memory):
    """What ``primitive`` takes for a load from an address of that letter, and ``memory`` of its instruction."""

    def describe(address, dtype, keep, count):
        registers = loaded(dtype_of(dtype), count)
        n = len(registers)
        load = f"{name}{registers.suffix} {registers.names(0)}, [${n}];"
        text = f"{{ .reg .pred p; setp.ne.b32 p, ${n + 1}, 0; {registers.zeros()} @p {load} }}"

        def emit(code, address, _, keep, __):
            return registers.take(code, code.asm(text, registers.letters, letter + "r", [address, keep], memory))

        return registers.type, (operand(letter, address), dtype, operand("r", keep), count), emit

    return describe


@primitive(_load_or_zero_at("ld.shared", "r", memory=True))
def load_shared_or_zero(address, dtype, keep, count=None):
    """ld.shared, or zero where ``keep`` is 0, without an access."""


@primitive(_load_or_zero_at("ld.global.nc", "l", memory=False))
def load_global_or_zero(address, dtype, keep, count=None):
    """ld.global.nc, or zero where ``keep`` is 0, without an access; of memory that nobody writes meanwhile: it may be moved."""


def _store_shared(address, dtype, values):
    registers = stored(dtype_of(dtype), values)

    def emit(code, address, _, values):
        text = f"st.shared{registers.suffix} [$0], {registers.names(1)};"
        code.asm(text, "", "r" + registers.letters, [address, *registers.fill(code, values)])

    return types.void, (operand("r", address), dtype, registers.type), emit


@primitive(_store_shared)
def store_shared(address, dtype, values):
    """st.shared: a value, or a tuple of them."""


def _stream(address, dtype, values, keep):
    registers = stored(dtype_of(dtype), values)

    def emit(code, address, _, values, keep):
        store = f"st.global.cs{registers.suffix} [$0], {registers.names(1)};"
        text = f"{{ .reg .pred p; setp.ne.b32 p, ${len(registers) + 1}, 0; @p {store} }}"
        code.asm(text, "", f"l{registers.letters}r", [address, *registers.fill(code, values), keep])

    return types.void, (operand("l", address), dtype, registers.type, operand("r", keep)), emit


@primitive(_stream)
def stream(address, dtype, values, keep):
    """st.global.cs: a value, or a tuple of them, not read again soon; where ``keep`` is 0, nothing."""
