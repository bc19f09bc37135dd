"""What the tests of the primitives share: their kernels, where they run, and how their instructions are checked."""

import math
import re

import pytest
import torch
from numba import cuda
from numba.cuda import types

from numba_impl.cuda.device import SIMULATED
from numba_impl.cuda.kernel import Kernel
from tests.cases import bits
from tests.cuda.test_codegen import assemble

THREADS = 128
FLOATS, INTS, LONGS, SHORTS = (types.CPointer(t) for t in (types.float32, types.int32, types.int64, types.int16))
LARGEST = torch.finfo(torch.float32).max
# The simulator computes with NumPy, which warns of what the IEEE rules make of infinities.
NUMPY_WARNS = "ignore:.*encountered in:RuntimeWarning"
# The dtypes that a primitive of any width is tested with, and torch's of the same bits. bfloat16 goes as int16.
DTYPES = {types.float32: torch.float32, types.int32: torch.int32, types.float16: torch.float16, types.int16: torch.int16}


def registry():
    """({name: (kernel, instructions that its PTX must have)}, a decorator that enters a function's kernel there)."""
    kernels = {}

    def kernel(instructions, *arguments, label="", threads=THREADS, blocks=1, shared_bytes=0):
        """Decorator: the kernel of a function that takes these arguments; instructions as ``check_instructions`` takes them.

        ``label``, after the function's name, tells it from others of that name.
        """

        def build(function):
            built = Kernel(function, types.void(*arguments), threads, blocks, shared_bytes=shared_bytes)
            name = f"{function.__name__} {label}".strip()
            assert name not in kernels
            kernels[name] = built, instructions
            return built

        return build

    return kernels, kernel


def unary(kernel, primitive, instruction, source, result):
    """The kernel y[i] = primitive(x[i]), made by that decorator."""

    def function(x, y, size):
        for i in range(cuda.grid(1), size, cuda.gridsize(1)):
            y[i] = primitive(x[i])

    function.__name__ = primitive.__name__
    return kernel([instruction], source, result, types.int32)(function)


def binary(kernel, primitive, instruction, source, result):
    """The kernel z[i] = primitive(x[i], y[i]), made by that decorator."""

    def function(x, y, z, size):
        for i in range(cuda.grid(1), size, cuda.gridsize(1)):
            z[i] = primitive(x[i], y[i])

    function.__name__ = primitive.__name__
    return kernel([instruction], source, source, result, types.int32)(function)


def start(kernel, *arrays, numbers=(), blocks=1):
    """Launch a kernel on the device of its arrays."""
    kernel.prepare(arrays[0].device, blocks)(arrays, numbers)


def results(kernel, inputs, dtypes, kernel_device):
    """What an elementwise kernel makes of the inputs: a tensor of each dtype, on the CPU.

    The simulator needs a millisecond for each thread: there a few compute all values.
    """
    inputs = [t.contiguous().to(kernel_device) for t in inputs]
    size = inputs[0].numel()
    outputs = [torch.zeros(size, dtype=dtype, device=kernel_device) for dtype in dtypes]
    start(kernel, *inputs, *outputs, numbers=(size,), blocks=1 if SIMULATED else -(-size // THREADS))
    return [t.cpu() for t in outputs]


def every_16_bits():
    """All patterns, in any order."""
    return torch.randperm(2**16).to(torch.int16)


def around_the_ties(dtype):
    """fp32 halfway between all neighbours of a 16-bit dtype, from 0 to what becomes infinite, their neighbours, and -0.0."""
    patterns = torch.arange(torch.tensor(math.inf, dtype=dtype).view(torch.int16).item() + 1)
    held = patterns.to(torch.int16).view(dtype).double()
    held[-1] = 2 * held[-2] - held[-3]  # where the next would be
    ties = ((held[:-1] + held[1:]) / 2).float()
    near = torch.cat([ties, torch.nextafter(ties, torch.tensor(0.0)), torch.nextafter(ties, torch.tensor(math.inf))])
    return torch.cat([near, -near, torch.tensor([-0.0])])


def drawn(dtype, *shape, device="cpu"):
    """Numbers of a torch dtype: any bits of integers, normally distributed floats."""
    if dtype.is_floating_point:
        return torch.randn(shape, device=device).to(dtype)
    return torch.randint(-(2**31), 2**31, shape, device=device).to(torch.int32).to(dtype)


def on_hopper(test):
    """Decorator: a GPU test of instructions that no other GPU need have."""
    return pytest.mark.gpu(pytest.mark.usefixtures("hopper")(test))


def on_both(test):
    """Decorator: a test for the GPU and for the simulator."""
    return pytest.mark.gpu(pytest.mark.simulator(pytest.mark.filterwarnings(NUMPY_WARNS)(test)))


def assert_near(got, want, bound):
    """Within a bound of float64; infinite where that is past fp32's range, NaN where that is."""
    got = got.double()
    want = torch.where(want.abs() > LARGEST, want.sign() * float("inf"), want)
    good = torch.where(want.isfinite(), (got - want).abs() <= bound, (got == want) | (got.isnan() & want.isnan()))
    bad = good.logical_not()
    assert not bad.any(), f"{bad.sum()} of {bad.numel()} values wrong: got {got[bad][:4]}, want {want[bad][:4]}"


def assert_equal(got, want):
    """Value by value, where NaN equals NaN and zeros have no sign."""
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


def assert_same_bits(got, want):
    """Value by value, where any NaN equals NaN, but zeros have signs."""
    same = (bits(got) == bits(want)) | (got.isnan() & want.isnan())
    assert same.all(), f"{(~same).sum()} of {same.numel()} values wrong: got {got[~same][:4]}, want {want[~same][:4]}"


def check_instructions(kernel, instructions):
    """Assert that a kernel's PTX has the instructions; then that ptxas takes it, or skip where none reads it.

    In an instruction, % is any register, or an address by one, and ? the letter of a type, which NVVM chooses.
    """
    text = kernel.ptx((9, 0, "a"))
    line = " ".join(text.split())
    for instruction in instructions:
        pattern = re.escape(instruction).replace("%", r"%\w+(\+-?\d+)?").replace(r"\?", "[bfu]")
        assert re.search(pattern, line), f"{instruction} is missing:\n{text}"
    report = assemble(text, (9, 0, "a"))
    assert "Potential Performance Loss" not in report, report  # it ignores setmaxnreg, or waits for every wgmma
    assert "0 bytes spill stores, 0 bytes spill loads" in report, report
