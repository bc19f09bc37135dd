"""Plain PyTorch: the truth in any dtype, and what serves where nothing else does."""

import torch

from numba_impl import convolution
from numba_impl.backends.base import Backend, Plan, passes
from numba_impl.problem import Problem

# How often an operation goes through all values, after the convolution.
PASSES = {"forward": 4, "pre_gradient": 6, "activate": 4, "activate_gradient": 5, "channel_sum": 2}


def why_not(problem: Problem) -> str:
    return ""


def cycles(problem: Problem) -> float:
    return convolution.cycles(problem) + passes(problem, PASSES[problem.operation])


def plan(problem: Problem) -> Plan:
    return Plan(problem, RUNS[problem.operation](problem), problem.permitted, differentiable=True)


def _forward(problem):
    def run(x, weight, bias, constants):
        return problem.epilogue.forward(convolution.pre_activation(problem, x, weight, bias), constants)

    return run


def _pre_gradient(problem):
    def run(x, weight, bias, gy, constants):
        return problem.epilogue.gradient(convolution.pre_activation(problem, x, weight, bias), gy, constants)

    return run


def _activate(problem):
    return lambda x, y, constants: problem.epilogue.forward(x, constants)


def _activate_gradient(problem):
    return lambda x, gy, constants: problem.epilogue.gradient(x, gy, constants)


def _channel_sum(problem):
    return lambda g, constants: g.sum((0, 2, 3), dtype=torch.promote_types(g.dtype, torch.float32))


RUNS = {
    "forward": _forward,
    "pre_gradient": _pre_gradient,
    "activate": _activate,
    "activate_gradient": _activate_gradient,
    "channel_sum": _channel_sum,
}
BACKEND = Backend(why_not, cycles, plan)
