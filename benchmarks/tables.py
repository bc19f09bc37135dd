"""One case: every row checked, then timed."""

import dataclasses
import functools

import torch

from benchmarks import machine, peers, training
from benchmarks.measure import CONSTANTS, Contender, Work, named, peak_memory, verify
from benchmarks.results import Errors, Row, Table, bytes_moved, title
from benchmarks.timer import Timer
from model_numba import ModelNumba
from numba_impl import convolution, dispatch, functional, oracle
from numba_impl.backends import BACKENDS
from numba_impl.case import Case
from numba_impl.oracle import BARE
from numba_impl.problem import Problem

MODEL = "model"  # ModelNumba, for which dispatch chooses the backend
NAMES = (*BACKENDS, MODEL)


class NothingToTime(Exception):
    """None of the backends asked for serves."""


def say(line):
    """Prints a line of progress at once."""
    print(line, flush=True)


def measure(case: Case, precisions, backends, seed, compiled, trained, timer: Timer) -> Table:
    """The table of a case. Raises ``oracle.Wrong`` before anything is timed if a result of ours is wrong."""
    say(f"\n{title(case)}")
    device = timer.device
    work = Work.draw(case, device, seed)
    if trained:
        work = dataclasses.replace(work, training=training.draw(work, precisions))
    contenders, notes = [], []
    for precision, theirs in peers.peers(work, precisions, compiled).items():
        mine, declined = ours(work, precision, backends)
        contenders += theirs + mine
        notes += declined
    if not any(contender.ours for contender in contenders):
        raise NothingToTime("; ".join(notes))
    if not compiled:
        notes.append("torch.compile: --quick has no time for it")
    elif device.type == "cuda" and (reason := peers.no_pixel_shuffle(work)):
        notes.append(f"the pixel-shuffle rewrite: {reason}")
    if not trained and (reason := timer.no_warm(bytes_moved(case))):
        notes.append(f"figures with a warm L2: {reason}")
    check = training.verify if trained else verify
    checked = {contender: prepare(contender, work, check) for contender in contenders if contender.ours}

    def further(call, timing):
        return {} if trained else timer.further(call, timing, bytes_moved(case))

    copy, pointwise = (time_copy(work.training.gy, timer), None) if trained else measure_pointwise(work, timer)
    rows = [
        measure_row(contender, work, timer, checked.get(contender) or prepare(contender, work, check), further)
        for contender in contenders
    ]
    return Table(case, machine.name(device), copy, rows, pointwise, list(dict.fromkeys(notes)), trained)


def measure_row(contender: Contender, work: Work, timer: Timer, checked, further) -> Row:
    """The row of a contender, timed. ``checked``: what ``prepare`` gave for it; ``further(call, timing)``: its other timings."""
    if isinstance(checked, Row):
        return checked
    call, errors = checked
    measured = attempt(contender, work, lambda: (timer(call), peak_memory(call, timer.device)))
    if isinstance(measured, Row):
        return measured
    timing, memory = measured
    say(f"  {contender.name}, {contender.label}: {timing}")
    row = Row(contender.name, contender.label, contender.ours, errors, timing, memory=memory)
    found = attempt(contender, work, lambda: further(call, timing))
    if isinstance(found, Row):
        return dataclasses.replace(row, failure=found.failure)
    return dataclasses.replace(row, further=found)


def prepare(contender: Contender, work: Work, check):
    """(the call to time, its errors), as ``check(contender, work)`` gives them, of a contender that passes, or its failed Row."""
    checked = attempt(contender, work, lambda: check(contender, work))
    if not isinstance(checked, Row):
        say(f"  {contender.name}, {contender.label}: {checked[1]}")
    return checked


def attempt(contender: Contender, work: Work, action):
    """``action()`` in the contender's precision, or its failed Row; a wrong result of ours raises."""
    torch.cuda.empty_cache()  # of the memory that the row before used
    try:
        with convolution.in_precision(contender.precision, work.x.device):
            return action()
    except Exception as error:
        if contender.ours and isinstance(error, oracle.Wrong):
            raise
        return failed(contender.name, contender.label, contender.ours, error)


def failed(name, precision, ours, error) -> Row:
    reason = f"{type(error).__name__}: {error}".splitlines()[0][:120]
    say(f"  {name}, {precision}: failed: {reason}")
    return Row(name, precision, ours, failure=reason)


def measure_pointwise(work: Work, timer: Timer):
    """(timing of ``copy_`` on a tensor of the output's shape, Row of the pointwise kernel in place on it)."""
    name = "pointwise kernel in place"
    z = torch.randn(work.case.output_shape, device=work.x.device)
    copy = time_copy(z, timer)
    try:
        with named(name, "fp32"):
            output, unclamped = (oracle.check_epilogue(activate(z.clone(), c), z, c) for c in (CONSTANTS, BARE))
        timing = timer(lambda: activate(z, CONSTANTS))
    except oracle.Wrong:
        raise
    except Exception as error:
        return copy, failed(name, "fp32", True, error)
    say(f"  {name}: {timing}")
    return copy, Row(name, "fp32", True, Errors(output.largest, unclamped.relative), timing)


def time_copy(z, timer: Timer):
    copy = timer.copy(torch.empty_like(z), z)
    say(f"  copy_ of the output: {copy}")
    return copy


def activate(z, constants):
    return functional.mish_add_hardtanh_scale(z, *constants, inplace=True)


def ours(work: Work, precision, names):
    """(contenders of ours in a precision, notes on those that cannot serve)."""
    problem = describe(work, precision)
    with convolution.in_precision(precision, work.x.device):
        by_flags = describe(work, None)  # as the peers see it
    build_forced = build_model if work.training else build_backend
    found, notes = [], []
    for name in names:
        if name == MODEL:
            build = functools.partial(build_model, work, by_flags, None)
            found.append(Contender(f"ModelNumba ({dispatch.choose(by_flags)[0]})", precision, True, build))
        elif reason := why_no_row(problem, name, precision):
            notes.append(f"backend {name}: {reason}")
        else:
            found.append(Contender(f"backend {name}", precision, True, functools.partial(build_forced, work, problem, name)))
    return found, notes


def describe(work: Work, precision) -> Problem:
    """The problem of the layer's forward, where a user asks for ``precision``."""
    case, (x, weight, bias, _) = work.case, work.operands
    return functional.describe(x, weight, bias, case.stride, case.padding, case.output_padding, precision)


def why_no_row(problem: Problem, name, precision) -> str:
    """Why a backend has no row in a precision; empty if it has one."""
    if reason := BACKENDS[name].why_not(problem):
        return reason
    computes = BACKENDS[name].plan(problem).precision
    return "" if computes == precision else f"it computes in {computes}, also where {precision} is permitted"


def build_backend(work: Work, problem: Problem, name, constants):
    _, weight, bias, _ = work.operands
    plan = dispatch.plan(problem, name)
    return lambda x: plan(x, weight, bias, constants=constants)


def build_model(work: Work, problem: Problem, name, constants):
    if constants != CONSTANTS:  # the module has no clamp to lift; the plan that it calls has
        return build_backend(work, problem, name, constants)
    precision = None if problem.by_flags else problem.permitted
    return ModelNumba.from_conv(work.conv, constants.add_value, constants.scale, precision=precision, backend=name)
