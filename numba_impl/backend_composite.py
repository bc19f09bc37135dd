"""CUDA: torch's convolution, then the pointwise kernel in place on its result."""

from numba_impl import cuda_support, reference
from numba_impl.problem import Constants, Problem


def supports(problem: Problem):
    return cuda_support.serves(problem)


def run(x, weight, bias, constants: Constants, problem: Problem):
    with reference.convolution_precision(problem.precision, x.device):
        z = reference.conv_transpose2d(x, weight, bias, problem.geometry)
    return activate(z, z, constants)


def activate(x, y, constants: Constants):
    """The epilogue from ``x`` into ``y``, which is returned: dense fp32 CUDA tensors of the same strides, or one tensor."""
    from numba_impl.kernels import pointwise

    pointwise.launch(x, y, *constants)
    return y
