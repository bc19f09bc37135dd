"""Plain PyTorch: the truth in any dtype, and what serves where nothing else does."""

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
        with convolution.in_precision(problem.permitted, x.device):
            z = convolution.forward(x, weight, bias, problem.geometry)
        return problem.epilogue.forward(z, constants)

    return run


def _pre_gradient(problem):
    def run(x, weight, bias, gy, constants):
        with convolution.in_precision(problem.permitted, x.device):
            z = convolution.forward(x, weight, bias, problem.geometry)
        return problem.epilogue.gradient(z, gy, constants)

    return run


def _activate(problem):
    return lambda x, y, constants: problem.epilogue.forward(x, constants)


def _activate_gradient(problem):
    return lambda x, gy, constants: problem.epilogue.gradient(x, gy, constants)


def _channel_sum(problem):
    return lambda g, constants: g.sum((0, 2, 3))


RUNS = {
    "forward": _forward,
    "pre_gradient": _pre_gradient,
    "activate": _activate,
    "activate_gradient": _activate_gradient,
    "channel_sum": _channel_sum,
}
BACKEND = Backend(why_not, cycles, plan)
