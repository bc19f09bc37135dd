"""CUDA: torch's convolution, then a pointwise kernel in place on its result."""

from numba_impl import gpu as cuda_support
from numba_impl.backends import reference
from numba_impl.problem import Constants, Problem


def supports(problem: Problem):
    return cuda_support.serves(problem)


def run(x, weight, bias, constants: Constants, problem: Problem, gy=None):
    with reference.convolution_precision(problem.precision, x.device):
        z = reference.conv_transpose2d(x, weight, bias, problem.geometry)
    return activate(z, z, constants) if gy is None else activate_backward(z, reference.laid_out_as(gy, z), constants)


def activate(x, y, constants: Constants):
    """The epilogue from ``x`` into ``y``, which is returned: dense fp32 CUDA tensors of the same strides, or one tensor."""
    from numba_impl.backends.composite import elementwise as pointwise

    pointwise.launch(x, y, *constants)
    return y


def activate_backward(z, gy, constants: Constants):
    """The epilogue's gradient at ``z`` from ``gy`` at its output, in z's memory, which is returned.

    Dense fp32 CUDA tensors of the same strides. 0 at the clamp's bounds and beyond, NaN where z is not finite.
    """
    from numba_impl.backends.composite import elementwise_gradient as pointwise_backward

    pointwise_backward.launch(z, gy, z, *constants)
    return z
