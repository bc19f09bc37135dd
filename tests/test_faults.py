"""Faults: a kernel that does not compile or load, memory that lacks, a context that is lost.

Of the first, the next backend serves, one warning says why, and a forced backend raises. The others are torch's errors.
"""

import gc
import re
import warnings
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from model_numba import ModelNumba
from numba_impl import dispatch, mish_add_hardtanh_scale
from numba_impl import gpu as cuda_support
from numba_impl.backends.base import Plan
from numba_impl.epilogue import MISH_ADD_HARDTANH_SCALE as CHAIN
from numba_impl.epilogue import Constants
from numba_impl.errors import KernelError
from numba_impl.oracle import check_epilogue, check_layer
from tests.cases import OPEN, USUAL, Case, apply, every_device, problem
from tests.test_citizen import run_script

CONSTANTS = Constants(-0.5, 2.0)
FAULT = "the kernel cannot be compiled: unsupported PTX version"
FIRST = {"cpu": "cpu", "cuda": "tiled"}  # the backend that serves USUAL


def refuse(*args, **kwargs):
    raise KernelError(FAULT)


def broken(monkeypatch, *names, at_once=True):
    """Backends whose kernels do not compile: when a plan is made, or when it is first used."""
    for name in names:
        plan = refuse if at_once else lambda problem: Plan(problem, refuse)
        monkeypatch.setitem(dispatch.BACKENDS, name, replace(dispatch.BACKENDS[name], plan=plan))
    dispatch.remembered.cache_clear()


@every_device
@pytest.mark.parametrize("at_once", [True, False])
def test_the_next_backend_serves_and_one_warning_says_why(at_once, device, monkeypatch):
    broken(monkeypatch, FIRST[device], at_once=at_once)
    tensors = USUAL.draw(device)
    with pytest.warns(RuntimeWarning, match=rf"'{FIRST[device]}' is out of service .*{FAULT}.*numba_impl doctor") as caught:
        check_layer(apply(*tensors, USUAL), *tensors, USUAL.geometry, CONSTANTS)
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_layer(apply(*tensors, USUAL), *tensors, USUAL.geometry, CONSTANTS)


@every_device
def test_the_eager_chain_serves_where_no_kernel_does(device, monkeypatch):
    names = "hopper", "tiled", "composite", "cpu"
    broken(monkeypatch, *names)
    model = ModelNumba(6, 5, 3, 2, 1, 1, -0.5, 2, precision="fp32").to(device)
    x = torch.randn(2, 6, 7, 9, device=device)
    conv = model.conv_transpose
    with pytest.warns(RuntimeWarning, match="out of service"), torch.no_grad():
        check_layer(model(x), x, conv.weight, conv.bias, USUAL.geometry, CONSTANTS)
    served, *declined = model.explain(x).splitlines()
    assert served.startswith("reference") and any(FAULT in line for line in declined)


@every_device
@pytest.mark.parametrize("at_once", [True, False])
def test_a_forced_backend_raises(at_once, device, monkeypatch):
    broken(monkeypatch, FIRST[device], at_once=at_once)
    with pytest.raises(KernelError, match=FAULT):
        apply(*USUAL.draw(device), USUAL, backend=FIRST[device])


@every_device
def test_training_goes_on(device, monkeypatch):
    """A backward's kernel fails after the forward's compiled."""
    tensors = [t.requires_grad_() for t in USUAL.draw(device)]
    want = torch.autograd.grad(apply(*tensors, USUAL).sum(), tensors)
    y = apply(*tensors, USUAL)
    broken(monkeypatch, "hopper", "tiled", "composite", "cpu")
    with pytest.warns(RuntimeWarning, match="out of service"):
        got = torch.autograd.grad(y.sum(), tensors)
    for ours, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("inplace", [False, True])
@every_device
def test_the_epilogue_alone(inplace, device, monkeypatch):
    broken(monkeypatch, "composite", "cpu")
    x = torch.randn(37, device=device)
    given = x.clone()
    with pytest.warns(RuntimeWarning, match="out of service"):
        y = mish_add_hardtanh_scale(given, OPEN.add_value, OPEN.scale, OPEN.min_val, OPEN.max_val, inplace)
    assert (y is given) == inplace
    check_epilogue(y, x, OPEN)


@pytest.mark.parametrize(
    ("words", "kind"),
    [("CUDA_ERROR_UNSUPPORTED_PTX_VERSION", KernelError), ("CUDA_ERROR_OUT_OF_MEMORY", torch.OutOfMemoryError)],
)
def test_memory_that_lacks_is_torchs_error(words, kind, monkeypatch):
    """Its backend stays in service: there may be memory for the next call."""
    from numba_impl.cuda import kernel as launch

    def fail(**options):
        raise RuntimeError(words)

    monkeypatch.setattr(launch.cuda, "jit", fail)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    kernel = launch.Kernel(lambda: None, None, threads=32, blocks=1)
    with pytest.raises(kind, match=f"cannot be compiled or loaded on cuda:0: {words}"):
        kernel._load(0)


class Alarm(Exception):
    """A caller's, raised by a signal while a kernel compiles."""


@pytest.mark.parametrize("error", [Alarm("late"), MemoryError(), TimeoutError(), KeyboardInterrupt()], ids=repr)
def test_what_is_not_the_compilers_reaches_the_caller(error, monkeypatch):
    from numba_impl.cuda import kernel as launch

    def fail(**options):
        raise error

    monkeypatch.setattr(launch.cuda, "jit", fail)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    with pytest.raises(type(error)) as caught:
        launch.Kernel(lambda: None, None, threads=32, blocks=1)._load(0)
    assert caught.value is error and not isinstance(error, KernelError)


def without_nvvm(patch):
    from numba.cuda.cudadrv import nvvm

    patch.setattr(nvvm, "_nvvm", None)


def with_newer_ptx(patch):
    """Of a version that what assembles it does not know, as where NVVM is newer than the rest."""
    from numba.cuda.codegen import CUDACodeLibrary

    def link(library, linker, cc, ignore_nonlto=False):
        for ptx in library.get_asm_strs(cc):
            linker.add_ptx(re.sub(r"\.version \S+", ".version 99.0", ptx).encode())

    patch.setattr(CUDACodeLibrary, "_link_all", link)


compiler_faults = pytest.mark.parametrize(
    ("fault", "words"),
    [(without_nvvm, "libNVVM is not available"), (with_newer_ptx, "Unsupported .version 99.0")],
    ids=["no NVVM", "unsupported PTX version"],
)


@compiler_faults
def test_what_the_compiler_says_is_in_the_error(fault, words, compiler, monkeypatch):
    """Without a GPU: compiled and assembled, but not loaded."""
    from numba.cuda.codegen import CUDACodeLibrary

    from numba_impl.backends.hopper import weights as split
    from numba_impl.cuda import kernel as launch

    def load():
        kernel = split.build.__wrapped__()
        kernel.config = None  # nothing is kept on disk
        return kernel._load(0)

    monkeypatch.setattr(CUDACodeLibrary, "_ensure_cc", lambda library, cc: (9, 0, "a"))
    unbound = SimpleNamespace(module=SimpleNamespace(initialized=True))
    monkeypatch.setattr(CUDACodeLibrary, "get_cufunc", lambda library: unbound)
    monkeypatch.setattr(launch, "_load_code", lambda index, code: code)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert b"ELF" in load()
    fault(monkeypatch)
    with pytest.raises(KernelError, match=f"the kernel split cannot be compiled or loaded on cuda:0: (?s:.)*{words}"):
        load()


@pytest.mark.gpu
@compiler_faults
def test_a_compiler_that_fails(fault, words, monkeypatch, tmp_path):
    """Every kernel's first launch, with none kept on disk."""
    from numba_impl.backends.composite import channel_sum, elementwise
    from numba_impl.backends.tiled import kernel as tiled

    cuda_support.missing_libraries()  # not missed, when they were looked for
    for build in (tiled.build, elementwise.build, channel_sum.build):
        build.cache_clear()
    with monkeypatch.context() as patch:
        patch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
        fault(patch)
        tensors = [t.requires_grad_() for t in USUAL.draw("cuda")]
        for backend in ("tiled", "composite"):
            with pytest.raises(KernelError, match=words):
                apply(*tensors, USUAL, backend=backend)
        with pytest.warns(RuntimeWarning, match=f"out of service on cuda:0: (?s:.)*{words}(?s:.)*numba_impl doctor"):
            y = apply(*tensors, USUAL)
            y.sum().backward()
    check_layer(y, *tensors, USUAL.geometry, CONSTANTS)
    assert all(t.grad is not None for t in tensors)


@pytest.mark.gpu
def test_more_shared_memory_than_there_is():
    from numba.cuda import types

    from numba_impl.cuda.kernel import Kernel

    x = torch.zeros(1, device="cuda")
    kernel = Kernel(lambda x: None, types.void(types.CPointer(types.float32)), threads=32, blocks=1, shared_bytes=2**20)
    with pytest.raises(KernelError, match="1048576 bytes of shared memory a block refused on cuda:0: CUDA_ERROR"):
        kernel.prepare(x.device, 1)([x])


@pytest.mark.gpu
def test_too_little_shared_memory(monkeypatch):
    from numba_impl.backends.tiled import kernel as tiled
    from numba_impl.cuda import kernel as launch

    x = torch.randn(1, 256, 8, 8, device="cuda")
    model = ModelNumba(256, 64, 4, 2, 1, 0, -0.5, 2, precision="fp32", backend="tiled").cuda()
    tiled.build.cache_clear()  # so that the kernel is loaded anew
    monkeypatch.setattr(launch, "FREE_SHARED_BYTES", -1)
    monkeypatch.setattr(launch, "_allow_shared", refuse)
    with pytest.raises(KernelError, match=FAULT), torch.no_grad():
        model(x)
    model.backend = None
    with pytest.warns(RuntimeWarning, match="out of service"), torch.no_grad():
        y = model(x)
    torch.testing.assert_close(y, CHAIN.forward(model.conv_transpose(x), CONSTANTS), rtol=1e-4, atol=1e-4)


def test_a_lost_context_is_no_fault_of_a_backend(monkeypatch):
    """Loading fails then too, and no other backend could serve."""

    def query():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(query=query))
    described = problem(USUAL, torch.device("cuda", 0))
    with pytest.raises(RuntimeError, match="illegal memory access"):
        dispatch._otherwise("tiled", described, KernelError(FAULT))
    assert not dispatch._out_of_service


# A kernel writes far outside of all memory. From then on every call raises, whether its kernels are loaded or not.
LOST = """
import os, sys, warnings
import torch
from numba.cuda import types
from model_numba import ModelNumba
from numba_impl import mish_add_hardtanh_scale
from numba_impl.cuda.kernel import Kernel

def stray(x):
    x[1 << 40] = x[0]

models = [ModelNumba(16, 8, 3, 2, 1, 1, -0.5, 2, precision="fp32", backend=name).cuda() for name in sys.argv[2:]]
models.append(ModelNumba(16, 8, 3, 2, 1, 1, -0.5, 2, precision="fp32").cuda())
x = torch.randn(2, 16, 20, 36, device="cuda", requires_grad=True)

def train(model):
    torch.autograd.grad(model(x).sum(), [x, *model.parameters()])

calls = [lambda: mish_add_hardtanh_scale(x.detach(), 0.5, 2)]
calls += [lambda model=model, call=call: call(model) for model in models for call in (torch.no_grad()(lambda m: m(x)), train)]
for call in calls if sys.argv[1] == "loaded" else ():
    call()
torch.cuda.synchronize()
warnings.simplefilter("error")  # another backend would be no help
Kernel(stray, types.void(types.CPointer(types.float32)), 32, 1).prepare(x.device, 1)([x.detach()])
for number, call in enumerate(calls):
    try:
        call()
        torch.cuda.synchronize()
    except Exception as error:
        if isinstance(error, Warning) or not any(word in str(error) for word in ("CUDA", "cuDNN", "CUDNN")):
            raise
        continue
    raise AssertionError(f"call {number} gave a result")
print("every call raised", flush=True)
os._exit(0)  # without the context nothing ends in order
"""


@pytest.mark.gpu
@pytest.mark.parametrize("state", ["loaded", "not loaded"])
def test_a_lost_context_is_an_error_of_every_call(state, tmp_path):
    names = ["hopper"] * (torch.cuda.get_device_capability() == (9, 0)) + ["tiled", "composite"]
    run_script(tmp_path, LOST, state, *names, seconds=300)  # it compiles every kernel


LARGE, SMALL = (Case((batch, 64, side, side), 64, 3, 2, 1, 1) for batch, side in ((8, 256), (1, 16)))
MORE = 2**28  # bytes, half of LARGE's output


@pytest.fixture
def little_memory():
    """Lets this process have no more of the GPU's memory than it has, and ``MORE``."""
    properties = torch.cuda.get_device_properties(0)

    def limit():
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + MORE) / properties.total_memory)

    yield limit
    torch.cuda.set_per_process_memory_fraction(1.0)


def check_out_of_memory(call):
    """It raises torch's error, and leaves no memory taken and every backend in service."""
    before = torch.cuda.memory_allocated()
    with pytest.raises(torch.OutOfMemoryError):
        call()
    gc.collect()
    assert torch.cuda.memory_allocated() == before
    assert not dispatch._out_of_service


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["hopper", "tiled", "composite", None])
def test_out_of_memory(backend, little_memory, request):
    if backend == "hopper":
        request.getfixturevalue("hopper")
    large, small = LARGE.draw("cuda"), SMALL.draw("cuda")
    apply(*small, SMALL, backend=backend)
    little_memory()
    check_out_of_memory(lambda: apply(*large, LARGE, backend=backend))
    check_layer(apply(*small, SMALL, backend=backend), *small, SMALL.geometry, CONSTANTS)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["hopper", "tiled", "composite", None])
def test_out_of_memory_in_the_backward(backend, little_memory, request):
    """The gradient at the output is one value, expanded."""
    if backend == "hopper":
        request.getfixturevalue("hopper")
    large, small = ([t.requires_grad_() for t in case.draw("cuda")] for case in (LARGE, SMALL))

    def step():
        return torch.autograd.grad(apply(*small, SMALL, backend=backend).sum(), small)

    want, y = step(), apply(*large, LARGE, backend=backend)
    little_memory()
    check_out_of_memory(lambda: torch.autograd.grad(y.sum(), large))
    for ours, theirs in zip(step(), want, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4 * theirs.abs().max().item())


@pytest.mark.gpu
def test_out_of_memory_of_the_epilogue_alone(little_memory):
    """In place it needs none."""
    x = torch.randn(2**27, device="cuda")
    block = x[: 2**20].clone()
    mish_add_hardtanh_scale(block.clone(), *OPEN)
    little_memory()
    check_out_of_memory(lambda: mish_add_hardtanh_scale(x, *OPEN))
    check_epilogue(mish_add_hardtanh_scale(block, *OPEN), block, OPEN)
    check_epilogue(mish_add_hardtanh_scale(x, *OPEN, inplace=True)[: 2**20], block, OPEN)
