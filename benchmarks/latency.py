"""The host's time for a call that the GPU finishes sooner: the peers', ours, and the parts of ours."""

import time

import torch

from benchmarks.measure import Work
from benchmarks.peers import Plain
from benchmarks.results import Case, Timing
from model_numba import ModelNumba
from numba_impl import autograd as ops
from numba_impl import dispatch, functional
from numba_impl.problem import kinds, layer_constants, modes

CASES = tuple(Case(shape, 64) for shape in ((1, 64, 8, 8), (1, 64, 32, 32), (8, 64, 32, 32), (16, 64, 64, 64)))
CALLS = 100  # timed together, after a wait for the GPU: too few to fill its queue, for which the host would wait
MODES = None, "default", "reduce-overhead"  # of torch.compile; None: not compiled


def report(device, seed, quick) -> str:
    """The figures of the first case, with PyTorch's flags as they are; nothing is compiled by torch if ``quick``."""
    work, milliseconds = Work.draw(CASES[0], device, seed), 100 if quick else 1000
    model = ModelNumba.from_conv(work.conv, *work.constants[:2])
    lines = [f"host time of a call at {work.case}, microseconds", *model.explain(work.x).splitlines()]
    for name, layer in {"eager": Plain(work.conv, work.constants), "ModelNumba": model}.items():
        for mode in MODES[:1] if quick else MODES:
            lines.append(line(f"{name}, torch.compile {mode}" if mode else name, layer, mode, work.x, milliseconds))
    lines.append("of which, in ModelNumba's:")
    lines += [f"  {1e3 * least:8.2f}  {name}" for name, least in parts(model, work.x, milliseconds).items()]
    return "\n".join(lines)


def line(name, layer, mode, x, milliseconds) -> str:
    torch._dynamo.reset()
    called = torch.compile(layer, mode=mode) if mode else layer
    try:
        timing = host_time(lambda: called(x), x.device, milliseconds)
    except Exception as error:
        return f"    failed  {name}: {type(error).__name__}: {error}".splitlines()[0][:120]
    return f"  {1e3 * timing.median:8.2f}  {name} (± {timing.spread:.1f} %)"


def host_time(function, device, milliseconds) -> Timing:
    """Of a call, by the host's clock, over repetitions for some ``milliseconds``."""
    _calls(function, device)  # compiles, and fills the allocator's cache
    times, end = [], time.perf_counter() + milliseconds / 1e3
    while not times or time.perf_counter() < end:
        times.append(1e3 * _calls(function, device))
    return Timing.of(times)


def _calls(function, device) -> float:
    """Seconds of one of ``CALLS``."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    for _ in range(CALLS):
        function()
    return (time.perf_counter() - start) / CALLS


def parts(model, x, milliseconds) -> dict[str, float]:
    """Milliseconds by name: what each layer of the code takes longer than the one that it calls, each at its least."""
    conv, settings = model.conv_transpose, (model.add_value, model.scale)
    tensors, numbers = (x, conv.weight, conv.bias), (conv.stride, conv.padding, conv.output_padding)
    constants = dict(zip(("add_value", "scale"), settings))
    plan = dispatch.plan(*kinds(*tensors), *numbers, modes(None, x.device))

    def least(function, *args, **kwargs):
        return host_time(lambda: function(*args, **kwargs), x.device, milliseconds).least

    module = least(model, x)
    function = least(functional.conv_transpose2d_mish_add_hardtanh_scale, *tensors, *numbers, **constants)
    run = least(plan, *tensors, layer_constants(*settings))
    operator = least(ops.layer, *tensors, *numbers, *settings, None, None)
    found = {"module: nn.Module's call, its attributes": module - function, "dispatch: arguments, the plan": function - run}
    if x.is_cuda:
        launches = recorded(lambda: plan(*tensors, layer_constants(*settings)))
        launch = least(repeat, launches)
        found["run: the output's memory, strides, addresses"] = run - launch
        found[f"launch: {len(launches)} by cuda.core and the driver"] = launch
    else:
        found["run"] = run
    return found | {"besides, through torch.library's operator": operator - function}


def recorded(function) -> list:
    """The arguments of every launch of our kernels in a call. Its memory is freed: repeat them before others use it."""
    from numba_impl.cuda import kernel as launch

    plain, found = launch.launch, []
    launch.launch = lambda *args: found.append(args)
    try:
        function()
    finally:
        launch.launch = plain
    return found


def repeat(launches):
    """Launch again, into memory that nothing else uses meanwhile."""
    from cuda.core import launch

    for args in launches:
        launch(*args)
