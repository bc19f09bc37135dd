"""What a backend is, and what it makes of a problem."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from numba_impl import gpu
from numba_impl.errors import KernelError
from numba_impl.problem import Problem

LAYER = ("forward", "pre_gradient")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # of the operands and results of what is ours, which sums in fp32
FORMATS = {"nchw": torch.contiguous_format, "nhwc": torch.channels_last}
BYTE = 1 / 8  # cycles of a multiprocessor that reads and writes one byte, at an H200's rate


@dataclass(frozen=True)
class Backend:
    """One way to compute: a folder or a file, and a line in ``backends.BACKENDS``."""

    why_not: Callable[[Problem], str]  # why it cannot serve a problem; empty if it can
    cycles: Callable[[Problem], float]  # predicted clock cycles, comparable among the backends that serve a device
    plan: Callable[[Problem], "Plan"]


@dataclass(frozen=True)
class Plan:
    """How calls of one kind are served: everything decided before the tensors are at hand."""

    problem: Problem
    run: Callable  # of a ``Problem.operation``'s tensors, and the epilogue's constants
    precision: str = "fp32"  # that products have
    images: int | None = None  # so many at a time are computed fastest; None: all
    between: torch.dtype = torch.float32  # to which the pre-activation is rounded on its way to the epilogue
    differentiable: bool = False  # it is made of torch's own operations alone
    # Dispatch fills in:
    backend: str = ""  # its name
    on_streams: bool = False  # the memory of the tensors is recorded on a side stream
    otherwise: Callable[[KernelError], "Plan"] | None = None  # the plan that replaces it where a kernel does not compile or load

    def __call__(self, *tensors, constants=()):
        """The result of the problem's operation; tensors as ``Problem`` lists them, None for no bias."""
        if self.on_streams:
            gpu.record_stream(*tensors)
        try:
            return self.run(*tensors, constants)
        except KernelError as error:
            if self.otherwise is None:
                raise
            otherwise = self.otherwise(error)
        return otherwise(*tensors, constants=constants)


def why_not_kernel(problem: Problem, operations, dtypes=DTYPES) -> str:
    """Why no CUDA kernel of ours that knows these ``operations`` and ``dtypes`` can serve; empty if one may."""
    return gpu.why_no_kernels(problem.device) or why_not_ours(problem, operations, dtypes)


def why_not_ours(problem: Problem, operations, dtypes=DTYPES) -> str:
    """Why no code of ours that knows these ``operations`` and ``dtypes`` can serve on any device; empty if some may."""
    if problem.operation not in operations:
        return f"it is for {' and '.join(operations)} alone, not {problem.operation}"
    if problem.x.dtype not in dtypes:
        return f"x is {problem.x.dtype}, not {' or '.join(map(str, dtypes))}"
    if problem.dtype not in dtypes:
        return f"autocast's dtype is {problem.dtype}, not {' or '.join(map(str, dtypes))}"
    return problem.torch_only


def dense(x) -> bool:
    """Whether x's elements fill one block of memory, in whatever order: no gap, none twice."""
    filled = 1
    for stride, size in sorted((stride, size) for stride, size in zip(x.stride(), x.shape) if size != 1):
        if stride != filled:
            return False
        filled *= size
    return True


def laid_out_as(t, like):
    """``t`` with the strides of ``like``, copied if it must be."""
    return t if t.stride() == like.stride() else torch.empty_like(like, dtype=t.dtype).copy_(t)


def in_format(problem: Problem, z):
    """What torch's convolution gave, with the strides that the problem's result has, in the same memory."""
    return z if problem.format == problem.convolved else z.flatten().view(z.shape)


def passes(problem: Problem, count) -> float:
    """Predicted cycles of reading and writing all values of a result ``count`` times."""
    values = math.prod(problem.x.shape if problem.geometry is None else problem.output_shape)
    multiprocessors = gpu.of(problem.device).multiprocessors if problem.device.type == "cuda" else 1
    return count * BYTE * problem.dtype.itemsize * values / multiprocessors
