"""Which backend serves a problem: of those that can, the one that is predicted to take the least time.

A ``Plan`` is made once for calls of a kind and remembered here, nowhere else.

Where a kernel of a backend does not compile or load, the backend is not asked again on that device, and
another one serves; a forced backend raises.
"""

import functools
import warnings
from dataclasses import replace

import torch

from numba_impl import gpu
from numba_impl.backends import BACKENDS
from numba_impl.backends.base import Plan
from numba_impl.errors import KernelError
from numba_impl.problem import Problem

_out_of_service = {}  # (backend, device) -> why


def check_backend(name):
    """Raises ValueError unless ``name`` is None or a backend's name."""
    if name is not None and name not in BACKENDS:
        raise ValueError(f"backend must be None or one of {tuple(BACKENDS)}, got {name!r}")


def choose(problem: Problem, forced=None) -> tuple[str, dict[str, str]]:
    """The name of the backend that serves, and {name: why not} of the others, but for the one ``forced``.

    Raises ValueError where the backend named by ``forced`` cannot serve.
    """
    check_backend(forced)
    if forced is not None:
        if reason := BACKENDS[forced].why_not(problem):
            raise ValueError(f"backend {forced!r} cannot serve this call: {reason}")
        return forced, {}
    reasons = {name: _why_not(name, problem) for name in BACKENDS}
    cycles = {name: BACKENDS[name].cycles(problem) for name, reason in reasons.items() if not reason}
    least = min(cycles, key=cycles.get)
    for name in cycles:
        reasons[name] = f"it would take some {cycles[name] / 1e3:.0f} thousand cycles, {least} {cycles[least] / 1e3:.0f}"
    return least, {name: reason for name, reason in reasons.items() if name != least}


def _why_not(name, problem):
    return _out_of_service.get((name, problem.device)) or BACKENDS[name].why_not(problem)


def plan(problem: Problem, forced=None) -> Plan:
    """A new plan. Raises ValueError where the backend named by ``forced`` cannot serve, KernelError where it is faulty."""
    name, _ = choose(problem, forced)
    otherwise = functools.partial(_otherwise, name, problem) if forced is None else None
    try:
        on_streams = problem.device.type == "cuda" and not problem.torch_only
        return replace(BACKENDS[name].plan(problem), backend=name, otherwise=otherwise, on_streams=on_streams)
    except KernelError as error:
        if otherwise is None:
            raise
        return otherwise(error)


@functools.lru_cache(maxsize=1024)
def remembered(describe, forced, *arguments) -> Plan:
    """``plan`` of the problem ``describe(*arguments)``, of which ``arguments`` are all that it depends on, less faults."""
    return plan(describe(*arguments), forced)


def forget():
    """Forget every plan, every backend that is out of service, and what is known of GPUs."""
    remembered.cache_clear()
    _out_of_service.clear()
    gpu.of.cache_clear()


def _otherwise(name, problem: Problem, error) -> Plan:
    """The plan without a backend, whose kernel has met an error: it goes out of service, with one warning.

    Raises torch's error where the kernel failed because the device's context has been lost.
    """
    device = problem.device
    if device.type == "cuda":
        torch.cuda.current_stream(device).query()  # raises where an earlier kernel's fault ended the context: no kernel loads
    remembered.cache_clear()
    if (name, device) not in _out_of_service:
        _out_of_service[name, device] = str(error)
        advice = "`python -m numba_impl doctor` says what is wrong"
        warnings.warn(f"backend {name!r} is out of service on {device}: {error}; {advice}", RuntimeWarning, stacklevel=4)
    return plan(problem)


def explain(problem: Problem, forced=None) -> str:
    """One line for the backend that serves, and one for each that does not, with the reason."""
    name, reasons = choose(problem, forced)
    shape = problem.batch, problem.in_channels, problem.height, problem.width
    precision = str(problem.dtype)[len("torch.") :] if problem.dtype.itemsize == 2 else BACKENDS[name].plan(problem).precision
    size, output = ("x".join(map(str, sizes)) for sizes in (shape, problem.output_shape))
    declined = [f"{other}: declined, {reason}" for other, reason in reasons.items()]
    return "\n".join([f"{name}: serves {size} -> {output} on {problem.device} in {precision}", *declined])
