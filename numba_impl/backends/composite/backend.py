"""CUDA: torch's convolution, then a kernel in place on its result; and such passes over memory alone."""

import torch

from numba_impl import convolution
from numba_impl.backends.base import Backend, Plan, dense, in_format, laid_out_as, passes, why_not_kernel
from numba_impl.problem import Problem


def why_not(problem: Problem) -> str:
    if reason := why_not_kernel(problem, RUNS):
        return reason
    if problem.operation == "channel_sum" and problem.x.format != "nchw":
        return "it sums planes, which channels_last has not"
    return ""


def cycles(problem: Problem) -> float:
    """The kernels go at the rate of the memory; that of sums writes next to nothing."""
    if problem.geometry is not None:
        return convolution.cycles(problem)
    return passes(problem, 0.5 if problem.operation == "channel_sum" else 1)


def plan(problem: Problem) -> Plan:
    return Plan(problem, RUNS[problem.operation](problem), problem.permitted, between=problem.dtype)


def _forward(problem):
    finish = _elementwise("activate", problem, problem.output_shape)

    def run(x, weight, bias, constants):
        z = convolution.pre_activation(problem, x, weight, bias)
        return in_format(problem, finish(z, z, constants))

    return run


def _pre_gradient(problem):
    finish = _elementwise("pre_gradient", problem, problem.output_shape)

    def run(x, weight, bias, gy, constants):
        z = convolution.pre_activation(problem, x, weight, bias)
        return finish(laid_out_as(gy, z), z, constants)

    return run


def _activate(problem):
    finish = _elementwise("activate", problem, problem.x.shape)

    def run(x, y, constants):
        source = x if dense(x) else x.clone()  # dense, in an order as near to x's as torch's own operations give
        target = source if source is y else torch.empty_like(source)
        return finish(source, target, constants)

    return run


def _activate_gradient(problem):
    finish = _elementwise("pre_gradient", problem, problem.x.shape)

    def run(x, gy, constants):
        z = x.clone()
        return finish(laid_out_as(gy, z), z, constants)

    return run


def _channel_sum(problem):
    from numba_impl.backends.composite import channel_sum

    sums = channel_sum.prepare(problem.device, problem.x.shape, problem.dtype)
    return lambda g, constants: sums(g.contiguous())


def _elementwise(operation, problem, shape):
    from numba_impl.backends.composite import elementwise

    return elementwise.prepare(operation, problem.epilogue, problem.device, shape, problem.dtype)


RUNS = {
    "forward": _forward,
    "pre_gradient": _pre_gradient,
    "activate": _activate,
    "activate_gradient": _activate_gradient,
    "channel_sum": _channel_sum,
}
BACKEND = Backend(why_not, cycles, plan)
