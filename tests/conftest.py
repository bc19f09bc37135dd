"""Where each test runs, and the seed of its data.

Markers: ``gpu`` needs a CUDA device; ``simulator`` runs in Numba's CUDA simulator, in a process of its
own that ``test_simulator.py`` starts. A kernel test carries both: the same lines check both targets.
"""

import functools
import math
import os
import secrets
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import settings
from torch.nn import functional as F

from numba_impl import convolution, dispatch

pytest.register_assert_rewrite("tests.cases", "tests.cuda.intrinsics")

SIMULATED = os.environ.get("NUMBA_ENABLE_CUDASIM") == "1"
LARGE = 2**30  # bytes
POISON = dict.fromkeys((torch.float32, torch.bfloat16, torch.float16), math.nan)
POISON |= {torch.int32: 0x7FFF7FFF, torch.int16: 0x7FFF}  # the bits of NaNs of fp16 and bf16

settings.register_profile("suite", deadline=None, print_blob=True)
settings.load_profile("suite")


def pytest_collection_modifyitems(config, items):
    """In the simulator only its own tests; elsewhere the rest, and a reason where a GPU is missing."""
    without_gpu = pytest.mark.skip(reason="needs a CUDA device")
    selected, deselected = [], []
    for item in items:
        simulator, gpu = (item.get_closest_marker(name) for name in ("simulator", "gpu"))
        runs_here = simulator if SIMULATED else gpu or not simulator
        (selected if runs_here else deselected).append(item)
        if gpu and not SIMULATED and not torch.cuda.is_available():
            item.add_marker(without_gpu)
    items[:] = sorted(selected, key=lambda item: item.path.stem != "test_simulator")  # the longest first, beside all others
    config.hook.pytest_deselected(items=deselected)


@pytest.fixture(autouse=True, scope="session")
def compiled_kernels(tmp_path_factory):
    """Kernels kept on disk by this run alone, for all of its workers."""
    folder = tmp_path_factory.getbasetemp()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NUMBA_CACHE_DIR", str(folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder))
        yield


@pytest.fixture(autouse=True, scope="session")
def poisoned_memory():
    """Memory that torch allocates for the package is full of NaN, so that what no kernel writes shows, wherever it came from."""
    with pytest.MonkeyPatch.context() as patch:
        for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
            patch.setattr(owner, name, poisoned(getattr(owner, name)))
        yield


def poisoned(allocate):
    """The same, filled with ``POISON``; what torch traces with has no values to fill."""

    @functools.wraps(allocate)
    def allocate_poisoned(*args, **kwargs):
        tensor = allocate(*args, **kwargs)
        if type(tensor) is torch.Tensor and tensor.dtype in POISON:
            with torch.no_grad():
                tensor.fill_(POISON[tensor.dtype])
        return tensor

    return allocate_poisoned


@pytest.fixture(autouse=True)
def seed():
    """A fresh seed for each test's data, printed so that a failure shows it; TEST_SEED repeats one."""
    value = int(os.environ.get("TEST_SEED") or secrets.randbelow(2**31))
    torch.manual_seed(value)
    print(f"TEST_SEED={value}")
    return value


@pytest.fixture(autouse=True)
def chosen_anew():
    """Backends neither chosen nor out of service because of another test, nor for the GPU that it made up."""
    dispatch.forget()


@pytest.fixture(autouse=True)
def memory_given_back():
    """What a large test took on a GPU: torch would keep it, and other processes may share the GPU."""
    yield
    if torch.cuda.is_initialized() and torch.cuda.memory_reserved() > LARGE:
        torch.cuda.empty_cache()


@pytest.fixture
def whole_gpu():
    """For a test that takes most of a GPU's memory: one at a time, in whichever processes."""
    import fcntl

    with open(Path(tempfile.gettempdir()) / f"numba_impl-whole-gpu-{os.getuid()}", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        torch.cuda.empty_cache()
        yield
        torch.cuda.empty_cache()


@pytest.fixture
def kernel_device():
    """Where kernel tests keep their tensors: the simulator's device memory is the CPU's."""
    return "cpu" if SIMULATED else "cuda"


@pytest.fixture
def torch_rounds_once(monkeypatch):
    """Torch's convolutions of 16 bits on a CPU, which round every tap's sum, as cuDNN's are, which round the result."""
    plain = F.conv_transpose2d

    def rounded_once(x, *others):
        dtype = x.dtype if x.dtype == torch.float64 else convolution.autocast(x.device) or x.dtype
        if x.device.type != "cpu" or dtype.itemsize != 2:
            return plain(x, *others)
        with torch.autocast("cpu", enabled=False):
            return plain(*(t.to(dtype).float() if isinstance(t, torch.Tensor) else t for t in (x, *others))).to(dtype)

    monkeypatch.setattr(F, "conv_transpose2d", rounded_once)


@pytest.fixture
def conv_precision():
    """Sets PyTorch's flag for cuDNN's fp32 convolutions ("ieee" or "tf32"); it and the old flag are reset afterwards."""
    conv = torch.backends.cudnn.conv
    before = conv.fp32_precision

    def set_flag(value):
        conv.fp32_precision = value

    yield set_flag
    torch.backends.cudnn.allow_tf32 = before == "tf32"
    set_flag(before)


@pytest.fixture
def compile_for(monkeypatch):
    """Gives numba-cuda, which asks for a device whenever it compiles, one of a compute capability."""
    import numba.cuda.dispatcher

    def compile_for(capability):
        device = SimpleNamespace(compute_capability=capability)
        monkeypatch.setattr(numba.cuda.dispatcher, "get_current_device", lambda: device)

    return compile_for


@pytest.fixture
def compiler(compile_for):
    """A Hopper GPU for numba-cuda."""
    compile_for((9, 0))


@pytest.fixture
def hopper():
    capability = torch.cuda.get_device_capability()
    if capability != (9, 0):
        pytest.skip(f"for compute capability (9, 0) alone, not {capability}")
