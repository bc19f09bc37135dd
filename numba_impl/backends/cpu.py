"""CPU: torch's convolution, then the epilogue in one pass, on as many threads as torch uses.

16-bit operands are widened first (``convolution.computed_in``), so that a result is rounded once, after the epilogue.
"""

import functools
import math
import threading
from collections.abc import Callable
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch

from numba_impl import convolution
from numba_impl.backends.base import FORMATS, LAYER, Backend, Plan, dense, in_format, laid_out_as, passes, why_not_ours
from numba_impl.epilogue import Epilogue, Operations
from numba_impl.errors import KernelError
from numba_impl.problem import Problem

CHUNK = 2**20  # values of the pre-activation: 4 MiB; fresh pages for more cost as much as the convolution

# One loop at a time: it has all threads, and not every threading layer of Numba's can be called from two.
_PARALLEL = threading.Lock()

# 2^f for |f| <= 1/2, highest power first: least-squares fit of relative error 2e-9
EXP2 = tuple(np.float32(c) for c in (1.5345773e-4, 1.3399932e-3, 9.6184891e-3, 5.5503286e-2, 2.4022646e-1, 6.9314718e-1, 1.0))


def why_not(problem: Problem) -> str:
    if problem.device.type != "cpu":
        return f"x is on {problem.device}, not on the CPU"
    return why_not_ours(problem, (*LAYER, "activate", "activate_gradient"))


def cycles(problem: Problem) -> float:
    return passes(problem, 1)


def plan(problem: Problem) -> Plan:
    if problem.operation == "activate":
        return Plan(problem, _activate(problem.epilogue))
    if problem.operation == "activate_gradient":
        return Plan(problem, _activate_gradient(problem.epilogue))
    images = max(1, CHUNK // max(1, math.prod(problem.output_shape[1:])))
    if problem.operation == "forward":
        return Plan(problem, _forward(problem, images))
    return Plan(problem, _pre_gradient(problem), images=images)


def _casts_itself(run):
    """Decorator: autocast would cast what has been widened."""

    @functools.wraps(run)
    def without_autocast(*tensors_and_constants):
        with torch._C._DisableAutocast():
            return run(*tensors_and_constants)

    return without_autocast


def _forward(problem, images):
    """A few images at a time, so that the pre-activation stays in cache and in memory that the allocator keeps."""
    batch, epilogue = problem.batch, problem.epilogue

    @_casts_itself
    def run(x, weight, bias, constants):
        x, weight, bias = convolution.cast(problem.dtype, x, weight, bias)  # rounded first
        weight, bias = convolution.cast(convolution.computed_in(problem), weight, bias)
        if images >= batch and x.dtype == torch.float32:
            z = convolution.forward(x, weight, bias, problem.geometry)
            _run(epilogue, "forward", (z, z), constants)
            return in_format(problem, z)
        y = torch.empty(problem.output_shape, dtype=x.dtype, device=x.device, memory_format=FORMATS[problem.format])
        for first in range(0, batch, images):
            part = slice(first, first + images)
            z = convolution.forward(x[part].float(), weight, bias, problem.geometry)
            _run(epilogue, "forward", (laid_out_as(z, y[part]), y[part]), constants)
        return y

    return run


def _pre_gradient(problem):
    @_casts_itself
    def run(x, weight, bias, gy, constants):
        operands = convolution.cast(convolution.computed_in(problem), *convolution.cast(problem.dtype, x, weight, bias))
        z = convolution.forward(*operands, problem.geometry)
        _run(problem.epilogue, "gradient", (z, laid_out_as(gy, z)), constants)
        return z.to(problem.dtype)

    return run


def _activate(epilogue):
    def run(x, y, constants):
        source = x if dense(x) else x.clone()  # dense, in an order as near to x's as torch's own operations give
        target = source if source is y else torch.empty_like(source)
        _run(epilogue, "forward", (source, target), constants)
        return target

    return run


def _activate_gradient(epilogue):
    def run(x, gy, constants):
        g = x.clone()
        _run(epilogue, "gradient", (g, laid_out_as(gy, g)), constants)
        return g

    return run


def _run(epilogue: Epilogue, name, tensors, constants):
    """A loop of ``_Loops`` over dense tensors of the same strides. 16-bit ones are widened, a part at a time."""
    flat = [t.detach().as_strided((t.numel(),), (1,)) for t in tensors]
    if all(t.dtype == torch.float32 for t in flat):
        _run_fp32(epilogue, name, flat, constants)
        return
    result = WRITTEN[name]
    for parts in zip(*(t.split(CHUNK) for t in flat), strict=True):
        wide = [t.float() for t in parts]
        _run_fp32(epilogue, name, wide, constants)
        if wide[result] is not parts[result]:
            parts[result].copy_(wide[result])


def _run_fp32(epilogue, name, flat, constants):
    """On as many threads as torch uses; on one it starts no other, which a forked process may not do.

    Raises KernelError where Numba cannot run it.
    """
    arrays, numbers = [t.numpy() for t in flat], tuple(map(np.float32, constants))
    threads = min(torch.get_num_threads(), _most_threads())
    if threads == 1:
        getattr(_loops(epilogue, parallel=False), name)(*arrays, numbers)
        return
    with _PARALLEL, _on_threads(threads):
        getattr(_loops(epilogue, parallel=True), name)(*arrays, numbers)


def _most_threads() -> int:
    """Threads that Numba may start. Raises KernelError where it compiles nothing."""
    try:
        import numba
    except ImportError as error:  # of a NumPy that it does not know, too
        raise KernelError(f"Numba cannot be imported: {error}") from error
    if numba.config.DISABLE_JIT:
        raise KernelError("NUMBA_DISABLE_JIT is set, so that Numba compiles nothing: unset it")
    return numba.config.NUMBA_NUM_THREADS


@contextmanager
def _on_threads(threads):
    """Numba's loops run on so many threads meanwhile; afterwards Numba and torch, which may share OpenMP, have theirs again."""
    import numba

    torchs = torch.get_num_threads()
    try:
        before = numba.get_num_threads()
        if before != threads:
            numba.set_num_threads(threads)
    except ValueError as error:
        raise KernelError(f"Numba has no threading layer, which NUMBA_THREADING_LAYER names: {error}") from error
    try:
        yield
    finally:
        if before != threads:
            numba.set_num_threads(before)
        if torch.get_num_threads() != torchs:
            torch.set_num_threads(torchs)


class _Loops(NamedTuple):
    """Compiled loops over flat fp32 arrays: ``forward(x, y, constants)`` into y, ``gradient(z, gy, constants)`` into z."""

    forward: Callable
    gradient: Callable


WRITTEN = {"forward": 1, "gradient": 0}  # which array


@functools.cache
def _loops(epilogue: Epilogue, parallel) -> _Loops:
    """Built on first use, since importing Numba takes half a second; each is compiled at its own first call."""
    import numba

    # The default error model tests each division for zero, and the test keeps the loop scalar.
    jit = functools.partial(numba.njit, fastmath={"contract"}, error_model="numpy")

    @jit
    def exp2(x):
        """Polynomial, so that the loop vectorises; x is at most 29, NaN gives a finite number."""
        k = np.floor(x + np.float32(0.5))
        f = x - k
        p = EXP2[0]
        for c in EXP2[1:]:
            p = p * f + c
        bits = np.int32((np.int32(k) + 127) << 23)
        return p * bits.view(np.float32) if x > np.float32(-126) else np.float32(0)

    @jit
    def reciprocal(x):
        return np.float32(1) / x

    @jit
    def minimum(x, y):
        return y if x > y else x

    @jit
    def maximum(x, y):
        return y if x < y else x

    operations = Operations(jit, exp2, reciprocal, minimum, maximum)
    forward_one, gradient_one = epilogue.build_forward(operations), epilogue.build_gradient(operations)

    @jit(parallel=parallel)
    def forward(x, y, constants):
        for i in numba.prange(x.size):
            y[i] = forward_one(x[i], constants)

    @jit(parallel=parallel)
    def gradient(z, gy, constants):
        for i in numba.prange(z.size):
            z[i] = gradient_one(z[i], gy[i], constants)

    return _Loops(forward, gradient)


BACKEND = Backend(why_not, cycles, plan)
