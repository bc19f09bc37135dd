"""The host's time for a call that the GPU finishes sooner: the peers', ours, and the parts of ours."""

import time

import torch

from benchmarks.measure import CONSTANTS, Work
from benchmarks.peers import Plain
from benchmarks.results import Timing, title
from model_numba import ModelNumba
from numba_impl import arguments, dispatch, functional
from numba_impl.case import Case
from numba_impl.cuda import kernel
from numba_impl.epilogue import MISH_ADD_HARDTANH_SCALE

CASES = tuple(Case(x, 64, 3, 2, 1, 1) for x in ((1, 64, 8, 8), (1, 64, 32, 32), (8, 64, 32, 32), (16, 64, 64, 64)))
CALLS = 100  # timed together, after a wait for the GPU: with more the GPU's queue fills, and the host waits
MODES = None, "default", "reduce-overhead"  # of torch.compile; None: not compiled


def report(device, seed, quick) -> str:
    """The figures of the first case, with PyTorch's flags as they are; ``quick`` leaves out what torch would compile."""
    work, milliseconds = Work.draw(CASES[0], device, seed), 100 if quick else 1000
    model = ModelNumba.from_conv(work.conv, CONSTANTS.add_value, CONSTANTS.scale)
    lines = [f"host time of a call at {title(work.case)}, microseconds", *model.explain(work.x).splitlines()]
    for name, layer in {"eager": Plain(work.conv, CONSTANTS), "ModelNumba": model}.items():
        for mode in MODES[:1] if quick else MODES:
            lines.append(line(f"{name}, torch.compile {mode}" if mode else name, layer, mode, work.x, milliseconds))
    lines.append("of which, in ModelNumba's:")
    lines += [f"  {1e3 * least:8.2f}  {name}" for name, least in parts(model, work, milliseconds).items()]
    return "\n".join(lines)


def line(name, layer, mode, x, milliseconds) -> str:
    """A layer's host time, or why it failed."""
    torch._dynamo.reset()
    called = torch.compile(layer, mode=mode) if mode else layer
    try:
        timing = host_time(lambda: called(x), x.device, milliseconds)
    except Exception as error:
        return f"    failed  {name}: {type(error).__name__}: {error}".splitlines()[0][:120]
    return f"  {1e3 * timing.median:8.2f}  {name} (± {timing.spread:.1f} %)"


def host_time(function, device, milliseconds) -> Timing:
    """The host's time of a call, repeated for some ``milliseconds``.

    Our own timer: those of triton and torch add the wait for the GPU, or the GPU's time alone.
    """
    _seconds(function, device)  # compiles, and fills the allocator's cache
    times, end = [], time.perf_counter() + milliseconds / 1e3
    while not times or time.perf_counter() < end:
        times.append(1e3 * _seconds(function, device))
    return Timing.of(times)


def _seconds(function, device) -> float:
    """The seconds of one of ``CALLS`` calls."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    for _ in range(CALLS):
        function()
    return (time.perf_counter() - start) / CALLS


def parts(model, work: Work, milliseconds) -> dict[str, float]:
    """{layer of the code: milliseconds that it takes longer than the layer below it}, each the least of many."""
    case, (x, weight, bias, _) = work.case, work.operands
    tensors, numbers = (x, weight, bias), (case.stride, case.padding, case.output_padding)
    problem = "forward", MISH_ADD_HARDTANH_SCALE, *arguments.kinds(*tensors), None, *numbers, arguments.modes(None, x)
    plan = dispatch.remembered(arguments.layer, None, *problem)

    def least(function, *args, **kwargs):
        return host_time(lambda: function(*args, **kwargs), x.device, milliseconds).least

    settings = dict(add_value=CONSTANTS.add_value, scale=CONSTANTS.scale)
    module = least(model, x)
    function = least(functional.conv_transpose2d_mish_add_hardtanh_scale, *tensors, *numbers, **settings)
    run = least(plan, *tensors, constants=CONSTANTS)
    operator = least(functional.LAYER, *tensors, *((n, n) for n in numbers), None, None, None, *CONSTANTS)
    found = {"module: nn.Module's call, its attributes": module - function, "dispatch: arguments, the plan": function - run}
    if x.is_cuda:
        launches = recorded(lambda: plan(*tensors, constants=CONSTANTS))
        launch = least(repeat, launches)
        found["run: the output's memory, strides, addresses"] = run - launch
        found[f"launch: {len(launches)} by cuda.core and the driver"] = launch
    else:
        found["run"] = run
    return found | {"besides, through torch.library's operator": operator - function}


def recorded(function) -> list:
    """The arguments of every launch of our kernels in a call. The call's memory is freed: use it for ``repeat`` at once."""
    plain, found = kernel.launch, []
    kernel.launch = lambda *args: found.append(args)
    try:
        function()
    finally:
        kernel.launch = plain
    return found


def repeat(launches):
    """Launch again, into memory that nothing else uses meanwhile."""
    for args in launches:
        kernel.launch(*args)
