"""Which backend serves a call: the first in order that can, and that pays.

A backend is a module with ``supports(problem) -> (ok, reason)`` and
``run(x, weight, bias, constants, problem, gy=None)``, which gives the layer's output, or, from the
gradient ``gy`` at it, of any strides, that at the pre-activation. Where much of the work is the same in every such call,
``prepare(problem, backward)`` does it and gives the function of ``(x, weight, bias, constants, gy)``, instead of ``run``.
A backend that is not always faster than those after it also
has ``pays(problem) -> (ok, reason)``, which a forced choice overrules; one that may compute in another
precision than is permitted has ``precision(problem)``.

Every call is served by a ``Plan``, which is remembered for calls of its kind.

Where a kernel of a backend does not compile or load, the backend is not asked again on that device, and
the next one serves; a forced backend raises.
"""

import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch

from numba_impl import gpu as cuda_support
from numba_impl.backends import cpu as backend_cpu
from numba_impl.backends import reference
from numba_impl.backends.composite import backend as backend_composite
from numba_impl.backends.hopper import backend as backend_hopper
from numba_impl.backends.tiled import backend as backend_tiled
from numba_impl.errors import KernelError
from numba_impl.problem import Problem

BACKENDS = {
    "hopper": backend_hopper,
    "tiled": backend_tiled,
    "composite": backend_composite,
    "cpu": backend_cpu,
    "reference": reference,
}

_out_of_service = {}  # (backend, device) -> why


def check_backend(name):
    """Raises ValueError unless ``name`` is None or a backend's name."""
    if name is not None and name not in BACKENDS:
        raise ValueError(f"backend must be None or one of {tuple(BACKENDS)}, got {name!r}")


@functools.lru_cache(maxsize=4096)
def _serves(name, problem: Problem, forced) -> tuple[bool, str]:
    """Whether a backend serves, and, unless forced, pays; and if not, why. Remembered, so without its kernels' faults."""
    backend = BACKENDS[name]
    ok, reason = backend.supports(problem)
    return backend.pays(problem) if ok and not forced and hasattr(backend, "pays") else (ok, reason)


def choose(problem: Problem, forced=None):
    """(name of the backend that serves, {name: why it declined} of those before it).

    Raises ValueError where the backend named by ``forced`` cannot serve.
    """
    check_backend(forced)
    if forced is not None:
        ok, reason = _serves(forced, problem, True)
        if not ok:
            raise ValueError(f"backend {forced!r} cannot serve this call: {reason}")
        return forced, {}
    declined = {}
    for name in BACKENDS:
        fault = _out_of_service.get((name, problem.device))
        ok, reason = (False, fault) if fault else _serves(name, problem, False)
        if ok:
            return name, declined
        declined[name] = reason
    raise AssertionError("the reference serves every call")


@dataclass(frozen=True)
class Plan:
    """How calls of one kind are served."""

    problem: Problem
    backend: str
    forced: bool
    run: Callable  # the backend's
    on_streams: bool  # the memory of the tensors is recorded on a side stream

    def __call__(self, x, weight, bias, constants, gy=None):
        """The layer's output, or from ``gy`` the gradient at the pre-activation; ``x`` is 4-D."""
        if self.on_streams:
            cuda_support.record_stream(x, weight, bias, gy)
        try:
            return self.run(x, weight, bias, constants, gy)
        except KernelError as error:
            if self.forced:
                raise
            _take_out_of_service(self.backend, self.problem.device, error)
        return prepare(self.problem, None, gy is not None)(x, weight, bias, constants, gy)


@functools.lru_cache(maxsize=1024)
def plan(x, weight, bias, stride, padding, output_padding, modes, forced=None, backward=False) -> Plan:
    """The plan for calls with tensors of such ``Kind``s, pairs of ints and ``Modes``: all that it depends on, less faults."""
    return prepare(Problem.of(x, weight, bias, stride, padding, output_padding, modes), forced, backward)


def prepare(problem: Problem, forced=None, backward=False) -> Plan:
    """A new plan. Raises ValueError where the backend named by ``forced`` cannot serve, KernelError where it is faulty."""
    name, _ = choose(problem, forced)
    if forced is None:
        run = attempt(name, problem.device, lambda: runner(name, problem, backward))
        if run is None:
            return prepare(problem, None, backward)
    else:
        run = runner(name, problem, backward)
    on_streams = problem.device.type == "cuda" and not problem.transformed
    return Plan(problem, name, forced is not None, run, on_streams)


def runner(name, problem: Problem, backward):
    """The function of (x, weight, bias, constants, gy) by which a backend serves."""
    backend = BACKENDS[name]
    if hasattr(backend, "prepare"):
        return backend.prepare(problem, backward)
    return lambda x, weight, bias, constants, gy: backend.run(x, weight, bias, constants, problem, gy)


def attempt(name, device, function):
    """``function()``, which runs kernels of a backend on a device; None where one does not compile or load, then or before.

    Raises torch's error where that is because the device's context has been lost.
    """
    if (name, device) in _out_of_service:
        return None
    try:
        return function()
    except KernelError as error:
        _take_out_of_service(name, device, error)
        return None


def _take_out_of_service(name, device, error):
    """With one warning; no plan that was made before is found again. Raises torch's error where the context has been lost."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).query()  # raises where an earlier kernel's fault ended the context: no kernel loads
    plan.cache_clear()
    if (name, device) not in _out_of_service:
        _out_of_service[name, device] = str(error)
        advice = "`python -m numba_impl doctor` says what is wrong"
        warnings.warn(f"backend {name!r} is out of service on {device}: {error}; {advice}", RuntimeWarning, stacklevel=3)


def precision(problem: Problem, forced=None) -> str:
    """In which precision the backend that serves computes."""
    name, _ = choose(problem, forced)
    return getattr(BACKENDS[name], "precision", lambda problem: problem.precision)(problem)


def explain(problem: Problem, forced=None) -> str:
    """One line for the backend that serves, and one for each that declined."""
    name, declined = choose(problem, forced)
    size = "x".join(map(str, (problem.batch, problem.in_channels, problem.height, problem.width)))
    lines = [
        f"{name}: serves {size} -> {'x'.join(map(str, problem.output_shape))} on {problem.device} in {precision(problem, forced)}"
    ]
    return "\n".join(lines + [f"{other}: declined, {reason}" for other, reason in declined.items()])
