"""One case: every row checked, then timed."""

import dataclasses
import functools

import torch

from benchmarks import machine, peers, training
from benchmarks.measure import UNCLAMPED, Contender, Work, WrongResult, check, differences, peak_memory, verify
from benchmarks.results import Case, Row, Table
from benchmarks.timer import Timer
from model_numba import ModelNumba
from numba_impl import dispatch, functional
from numba_impl.backends import reference

MODEL = "model"  # ModelNumba with dispatch's own choice
NAMES = (*dispatch.BACKENDS, MODEL)


class NothingToTime(Exception):
    """None of the backends asked for serves."""


def say(line):
    """Progress, at once."""
    print(line, flush=True)


def measure(case: Case, seed, precisions, backends, compiled, trained, timer: Timer) -> Table:
    """A case's table. Raises ``WrongResult`` before anything is timed if a result of ours is wrong."""
    say(f"\n{case}")
    device = timer.device
    work = Work.draw(case, device, seed)
    if trained:
        work = dataclasses.replace(work, gradients=training.draw(work))
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
    if not trained and (reason := timer.no_warm(case.bytes)):
        notes.append(f"figures with a warm L2: {reason}")
    checked = {contender: prepare(contender, work) for contender in contenders if contender.ours}
    copy, pointwise = (time_copy(work.gradients.gy, timer), None) if trained else measure_pointwise(work, timer)
    rows = [measure_row(contender, work, timer, checked.get(contender)) for contender in contenders]
    return Table(case, machine.name(device), copy, rows, pointwise, list(dict.fromkeys(notes)), trained)


def measure_row(contender: Contender, work: Work, timer: Timer, checked=None) -> Row:
    """Timed, once it is ``checked``, what ``prepare`` gave before or gives now."""
    checked = checked or prepare(contender, work)
    if isinstance(checked, Row):
        return checked
    call, errors = checked
    measured = attempt(contender, work, lambda: (timer(call), peak_memory(call, timer.device)))
    if isinstance(measured, Row):
        return measured
    timing, memory = measured
    say(f"  {contender.name}, {contender.precision}: {timing}")
    row = Row(contender.name, contender.precision, contender.ours, errors, timing, memory=memory)
    if work.gradients:
        return row
    further = attempt(contender, work, lambda: timer.further(call, timing, work.case.bytes))
    if isinstance(further, Row):
        return dataclasses.replace(row, failure=further.failure)
    return dataclasses.replace(row, further=further)


def prepare(contender: Contender, work: Work):
    """(the call to time, its errors) of a contender that passes its check, or its failed Row."""
    check_it = training.verify if work.gradients else verify
    checked = attempt(contender, work, lambda: check_it(contender, work))
    if not isinstance(checked, Row):
        say(f"  {contender.name}, {contender.precision}: {checked[1]}")
    return checked


def attempt(contender: Contender, work: Work, action):
    """``action()`` in the contender's precision, or its failed Row; a wrong result of ours raises."""
    torch.cuda.empty_cache()  # what the row before kept
    try:
        with reference.convolution_precision(contender.precision, work.x.device):
            return action()
    except Exception as error:
        if contender.ours and isinstance(error, WrongResult):
            raise
        return failed(contender.name, contender.precision, contender.ours, error)


def failed(name, precision, ours, error) -> Row:
    reason = f"{type(error).__name__}: {error}".splitlines()[0][:120]
    say(f"  {name}, {precision}: failed: {reason}")
    return Row(name, precision, ours, failure=reason)


def measure_pointwise(work: Work, timer: Timer):
    """(timing of ``copy_`` on a tensor of the output's shape, Row of the pointwise kernel in place on it)."""
    name, constants = "pointwise kernel in place", work.constants
    z = torch.randn(work.case.output_shape, device=work.x.device)
    copy = time_copy(z, timer)
    try:
        output, unclamped = (activate(z.clone(), c) for c in (constants, UNCLAMPED))
        errors = differences(output, unclamped, lambda images: z[images].double(), constants)
        check(name, "fp32", errors, constants.scale)
        timing = timer(lambda: activate(z, constants))
    except WrongResult:
        raise
    except Exception as error:
        return copy, failed(name, "fp32", True, error)
    say(f"  {name}: {timing}")
    return copy, Row(name, "fp32", True, errors, timing)


def time_copy(z, timer: Timer):
    copy = timer.copy(torch.empty_like(z), z)
    say(f"  copy_ of the output: {copy}")
    return copy


def activate(z, constants):
    return functional.mish_add_hardtanh_scale(z, *constants, inplace=True)


def ours(work: Work, precision, names):
    """(contenders of ours in a precision, notes on those that cannot serve)."""
    conv, x = work.conv, work.x
    settings = x, conv.weight, conv.bias, conv.stride, conv.padding, conv.output_padding
    problem = functional.describe(*settings, precision)
    with reference.convolution_precision(precision, x.device):
        by_flags = functional.describe(*settings, None)  # as the peers have it
    build_forced = build_model if work.gradients else build_backend
    found, notes = [], []
    for name in names:
        if name == MODEL:
            name, build = f"ModelNumba ({dispatch.choose(by_flags)[0]})", functools.partial(build_model, work, by_flags, None)
            found.append(Contender(name, precision, True, build))
            continue
        ok, reason = dispatch.BACKENDS[name].supports(problem)
        if ok and (computes := dispatch.precision(problem, name)) != precision:
            ok, reason = False, f"it computes in {computes}, also where {precision} is permitted"
        if ok:
            found.append(Contender(f"backend {name}", precision, True, functools.partial(build_forced, work, problem, name)))
        else:
            notes.append(f"backend {name}: {reason}")
    return found, notes


def build_backend(work, problem, name, constants):
    weight, bias = work.conv.weight, work.conv.bias
    plan = dispatch.prepare(problem, name)
    return lambda x: plan(x, weight, bias, constants)


def build_model(work, problem, name, constants):
    if constants != work.constants:  # the module has no clamp to lift; what it calls has
        return build_backend(work, problem, name, constants)
    precision = None if problem.by_flags else problem.precision
    return ModelNumba.from_conv(work.conv, constants.add_value, constants.scale, precision=precision, backend=name)
