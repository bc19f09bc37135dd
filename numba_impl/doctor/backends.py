"""Each backend computed against float64, printed as it goes: the first calls compile, which takes a while."""

import functools
import time
from collections.abc import Callable
from typing import NamedTuple

import torch

from numba_impl import dispatch, functional
from numba_impl.backends import reference
from numba_impl.doctor.findings import ERROR, Finding, failure_remedy
from numba_impl.doctor.probes import Facts, attempt
from numba_impl.problem import PRECISIONS, Constants, Geometry

SETTINGS = dict(stride=2, padding=1, output_padding=1)
CONSTANTS = Constants(add_value=0.25, scale=2.0)
TOLERANCE = {"fp32": 2e-5, "tf32": 1e-2}  # of the largest value; TF32 keeps 11 bits of each factor
EDGE = 0.05  # nearer to the clamp's bounds than this, where the gradient jumps, none is asked for


class Sample(NamedTuple):
    """A small call that every backend serves, and its results in float64: of the forward, of the backward."""

    inputs: tuple[torch.Tensor, ...]  # x, weight, bias
    gy: torch.Tensor
    results: tuple[torch.Tensor]
    gradients: tuple[torch.Tensor, ...]


@functools.lru_cache
def sample() -> Sample:
    draw = functools.partial(torch.randn, generator=torch.Generator().manual_seed(0), device="cpu", dtype=torch.float32)
    x, weight, bias = draw(2, 16, 9, 12), draw(16, 16, 3, 3) / 6, draw(16)
    with torch.enable_grad():
        leaves = [t.double().requires_grad_() for t in (x, weight, bias)]
        z = reference.conv_transpose2d(*leaves, Geometry.of(3, **SETTINGS))
        y = reference.mish_add_hardtanh_scale(z, CONSTANTS)
        value = torch.nn.functional.mish(z.detach()) + CONSTANTS.add_value
        near = torch.minimum((value - CONSTANTS.min_val).abs(), (value - CONSTANTS.max_val).abs()) < EDGE
        gy = draw(*y.shape).masked_fill(near, 0)
        gradients = torch.autograd.grad(y, leaves, gy.double())
    return Sample((x, weight, bias), gy, (y.detach(),), gradients)


def check_backends(facts: Facts, remedy) -> list[Finding]:
    """Print how every backend does, and give what is wrong; ``remedy`` stands for its own where earlier findings explain it."""
    findings = []
    for name in dispatch.BACKENDS:
        for device in facts.devices if facts.devices and name != "cpu" else [torch.device("cpu")]:
            lines = {}  # what there is to say -> in which precisions
            for precision in PRECISIONS:
                line, problems = check_backend(name, device, precision)
                lines.setdefault(line, []).append(precision)
                for problem in problems:
                    mends = remedy or failure_remedy(problem, facts.libraries)
                    findings.append(Finding(ERROR, f"{name} in {precision} on {device}: {problem}", mends))
            for line, precisions in lines.items():
                say(name, f"{' and '.join(precisions)} on {device}: {line}")
    return findings


def say(label, text):
    print(f"{label:<14} {text}", flush=True)


def check_backend(name, device, precision) -> tuple[str, list[str]]:
    """How a backend does, in one line with the seconds of its first calls, which compile; and what is wrong."""
    answer, trouble = attempt(serves, name, device, precision)
    if trouble:
        return trouble, [trouble]
    ok, reason = answer
    if not ok:
        return f"declined, {reason}", []
    parts, problems = [], []
    for run in (forward, backward):
        start = time.perf_counter()
        wrong, trouble = attempt(difference, run, name, device, precision)
        problem, seconds = trouble or wrong, time.perf_counter() - start
        parts.append(f"{run.__name__} {problem or 'ok'} ({seconds:.1f} s)")
        if problem:
            problems.append(f"{run.__name__} {problem}")
    return ", ".join(parts), problems


def serves(name, device, precision) -> tuple[bool, str]:
    """Whether the backend serves the sample, and if not, why: dispatch's question."""
    inputs = (t.to(device) for t in sample().inputs)
    problem = functional.describe(*inputs, *SETTINGS.values(), precision)
    return dispatch.BACKENDS[name].supports(problem)


def difference(run: Callable, name, device, precision) -> str:
    """Compile and run: how far from float64 the results are, or nothing where they are near enough."""
    got, want = run(name, device, precision)
    for ours, truth in zip(got, want, strict=True):
        error = (ours.detach().cpu().double() - truth).abs().max().item()
        allowed = TOLERANCE[precision] * truth.abs().max().item()
        if not error <= allowed:
            return f"off by {error:.1e}, where {allowed:.1e} is allowed"
    return ""


def forward(name, device, precision):
    with torch.no_grad():
        y = layer(*(t.to(device) for t in sample().inputs), name, precision)
    return (y,), sample().results


def backward(name, device, precision):
    with torch.enable_grad():
        leaves = [t.to(device, copy=True).requires_grad_() for t in sample().inputs]
        gradients = torch.autograd.grad(layer(*leaves, name, precision), leaves, sample().gy.to(device))
    return gradients, sample().gradients


def layer(x, weight, bias, name, precision):
    constants = dict(add_value=CONSTANTS.add_value, scale=CONSTANTS.scale)
    return functional.conv_transpose2d_mish_add_hardtanh_scale(
        x, weight, bias, **SETTINGS, **constants, precision=precision, backend=name
    )
