"""Under load: calls of changing shapes on changing streams, and from many threads; memory and caches stay within bounds."""

import gc
import importlib
import os
import pkgutil
import random
import threading
import weakref
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import nullcontext
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch

import numba_impl
from model_numba import ModelNumba
from numba_impl import dispatch, mish_add_hardtanh_scale
from numba_impl.backends.composite import elementwise as pointwise
from numba_impl.backends.hopper import kernel as hopper
from numba_impl.backends.hopper import weights as split
from numba_impl.backends.tiled import kernel as tiled
from numba_impl.cuda import kernel as launch
from numba_impl.epilogue import Constants
from numba_impl.oracle import check_layer
from numba_impl.problem import Geometry
from tests.cases import captured, every_device

CALLS = {"cpu": 1_000, "cuda": 100_000}  # of the soak; SOAK_CALLS overrules
WARM = 1 / 4  # of the calls, after which nothing more is to be kept
SLACK = {"cpu": 2**24, "cuda": 2**26}  # bytes that the process, and the GPU, may hold more then
TRAINED, CHECKED = 1 / 20, 1 / 100  # of the calls
STREAMS, THREADS, EACH = 4, 8, {"cpu": 25, "cuda": 1_000}
CONSTANTS = Constants(-0.5, 2.0)

K3, K4, ONE = (16, 8, 3, 2, 1, 1), (6, 5, 4, 2, 1, 0), (5, 7, 3, 1, 1, 0)
LAYERS = {
    "cpu": [(K3, "fp32", None), (K4, "fp32", "cpu"), (ONE, "fp32", "reference")],
    "cuda": [
        *[(K3, "fp32", "hopper"), (K3, "fp32", "tiled"), (K4, "fp32", None), (ONE, "fp32", "tiled")],
        *[(K4, "fp32", "composite"), (ONE, "tf32", None), (K3, "fp32", "reference")],
    ],
}
# (batch, height, width) where torch's convolutions take part, which keep something of every shape; elsewhere thousands.
FEW = [(1, 1, 1), (2, 5, 7), (1, 8, 3), (3, 6, 6)]


def layers(device):
    """The models, of those backends that this device has."""
    on_hopper = device == "cuda" and torch.cuda.get_device_capability() == (9, 0)
    return [
        ModelNumba(*arguments, *CONSTANTS[:2], precision=precision, backend=backend).to(device)
        for arguments, precision, backend in LAYERS[device]
        if backend != "hopper" or on_hopper
    ]


def soak(device, calls, seed):
    """Gives what was held when warm and after all calls."""
    torch.manual_seed(seed)
    draw = random.Random(seed)
    models, held_before = layers(device), None
    streams = [torch.cuda.Stream() for _ in range(STREAMS)] if device == "cuda" else []
    for number in range(calls):
        if number == int(calls * WARM):
            held_before = held(device)
        with torch.cuda.stream(draw.choice(streams)) if streams else nullcontext():
            call(draw.choice(models), device, draw)
    return held_before, held(device)


def call(model, device, draw):
    """One inference or training step."""
    conv, trained = model.conv_transpose, draw.random() < TRAINED
    convolves = trained or device == "cpu" or model.backend not in ("hopper", "tiled")
    batch, *size = draw.choice(FEW) if convolves else (draw.randint(1, 3), draw.randint(1, 40), draw.randint(1, 64))
    x = torch.randn(batch, conv.in_channels, *size, device=device, requires_grad=trained)
    with torch.set_grad_enabled(trained):
        y = model(x)
    if trained:
        torch.autograd.grad(y.sum(), [x, *model.parameters()])
    if draw.random() < CHECKED:
        geometry = Geometry.of(conv.kernel_size, conv.stride, conv.padding, conv.output_padding)
        check_layer(y, x, conv.weight, conv.bias, geometry, CONSTANTS, model.precision)


def held(device):
    """Bytes of live tensors, resident in the process, and used of the GPU by whomever, with torch's cache of it given back."""
    gc.collect()
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    if device == "cpu":
        tensors = [t for t in gc.get_objects() if type(t) in (torch.Tensor, torch.nn.Parameter) and t.layout == torch.strided]
        return sum(t.nbytes for t in tensors if t.device.type == "cpu"), resident, 0
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return torch.cuda.memory_allocated(), resident, total - free


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
@every_device
def test_soak(device, seed):
    """In a process of its own: in one that ran other tests, what they left moves about meanwhile."""
    calls = int(os.environ.get("SOAK_CALLS") or CALLS[device])
    with ProcessPoolExecutor(1, get_context("spawn")) as another:
        warm, after = another.submit(soak, device, calls, seed).result()
    (tensors, resident, used), (tensors_after, resident_after, used_after) = warm, after
    assert tensors_after == tensors
    assert resident_after - resident <= SLACK[device]
    if "PYTEST_XDIST_WORKER" not in os.environ:  # else others use the GPU meanwhile
        assert used_after - used <= SLACK[device]


@every_device
def test_threads(device):
    """Each on a stream of its own; every result is bit for bit what one call alone gave."""
    models = [model for model in layers(device) if device == "cpu" or model.backend in ("hopper", "tiled")]
    functions = [torch.no_grad()(model) for model in models] + [lambda x: mish_add_hardtanh_scale(x, *CONSTANTS)]
    channels = [model.conv_transpose.in_channels for model in models] + [1]
    jobs = []
    for function, count in zip(functions, channels, strict=True):
        for batch, height, width in ((2, 20, 36), (3, 7, 40)):  # in turn, so that memory is another tensor's each time
            x = torch.randn(batch, count, height, width, device=device)
            jobs.append((function, x, function(x)))
    if device == "cuda":
        torch.cuda.synchronize()

    def work(thread):
        with torch.cuda.stream(torch.cuda.Stream()) if device == "cuda" else nullcontext():
            for number in range(EACH[device]):
                function, x, want = jobs[(thread + number) % len(jobs)]
                assert torch.equal(function(x), want)
        return True

    with ThreadPoolExecutor(THREADS) as pool:
        assert all(pool.map(work, range(THREADS)))


# What outlives a call: each cache, and what bounds it where it has no limit of its own.
CACHES = {
    "numba_impl.dispatch.remembered": "a limit: all decisions",
    "numba_impl.epilogue.of": "a limit: checked constants",
    "numba_impl.gpu.of": "a limit: facts of a device",
    "numba_impl.gpu.missing_libraries": "it takes no argument",
    "numba_impl.cuda.cache._note": "the ways in which a directory cannot be used",
    "numba_impl.cuda.cache._toolchain": "it takes no argument",
    "numba_impl.cuda.tensor_map.encode": "a limit: maps of the last tensors",
    "numba_impl.cuda.kernel._stream": "a limit: streams as cuda.core has them",
    "numba_impl.cuda.values.of": "three dtypes",
    "numba_impl.backends.cpu._loops": "the epilogues, once for one thread and once for many",
    "numba_impl.autograd.operators": "the epilogues",
    "numba_impl.backends.composite.elementwise.build": "the kernels of the process",
    "numba_impl.backends.composite.channel_sum.build": "the kernels of the process",
    "numba_impl.backends.tiled.kernel.build": "the kernels of the process",
    "numba_impl.backends.tiled.weights.build": "the kernels of the process",
    "numba_impl.backends.hopper.kernel.build": "the kernels of the process",
    "numba_impl.backends.hopper.weights.build": "the kernels of the process",
}


def test_every_cache_is_bounded():
    names = [module.name for module in pkgutil.walk_packages(numba_impl.__path__, "numba_impl.")]
    modules = [importlib.import_module(name) for name in names if not name.endswith("__main__")]
    caches = {f for module in modules for f in vars(module).values() if hasattr(f, "cache_info")}
    assert {f"{f.__module__}.{f.__name__}" for f in caches} == set(CACHES)
    for f in caches:
        assert f.cache_info().maxsize or "limit" not in CACHES[f"{f.__module__}.{f.__name__}"]


def test_what_is_loaded_stays(monkeypatch):
    """Whoever forgets the kernel: a CUDA graph may launch it again, or it may be running."""
    monkeypatch.setattr(launch, "_resident", [])
    monkeypatch.setattr(launch, "_load_code", lambda index, code: threading.Event())
    monkeypatch.setattr(launch.Kernel, "_compile", lambda kernel: b"")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    loaded = weakref.ref(launch.Kernel(lambda: None, None, threads=32, blocks=1)._load(0))
    gc.collect()
    assert loaded() is not None


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["hopper", "tiled", "composite"])
def test_a_graph_outlives_what_is_remembered(backend, request):
    if backend == "hopper":
        request.getfixturevalue("hopper")
    model, x = ModelNumba(*K3, *CONSTANTS[:2], backend=backend, precision="fp32").cuda(), torch.randn(2, 16, 5, 36, device="cuda")
    with torch.no_grad():
        graph, y = captured(model, x)
        dispatch.forget()
        for build in (hopper.build, split.build, tiled.build, pointwise.build):
            build.cache_clear()
        gc.collect()
        x.copy_(torch.randn_like(x))
        graph.replay()
        conv = model.conv_transpose
        check_layer(y, x, conv.weight, conv.bias, Geometry.of(3, 2, 1, 1), CONSTANTS)
