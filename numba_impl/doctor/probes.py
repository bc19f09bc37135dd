"""Facts about the machine and the installation.

A probe gives facts, and never raises: ``attempt`` makes one line of what stopped it.
"""

import ctypes
import dataclasses
import importlib
import importlib.metadata
import os
import re
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch

from numba_impl.cuda import cache

SHOWN = "torch", "numba", "numba-cuda", "numpy", "cuda-core", "cuda-bindings"

# The package that brings NVVM: the library does not tell its CUDA version.
NVVM = {12: "nvidia-cuda-nvcc-cu12", 13: "nvidia-nvvm"}


class Gpu(NamedTuple):
    name: str
    capability: tuple[int, int]
    memory: int  # bytes
    multiprocessors: int


class Driver(NamedTuple):
    """The driver's release, the CUDA version it serves, the GPUs it shows, and why it shows none if it fails."""

    release: str
    cuda: tuple[int, int]
    gpus: tuple[Gpu, ...] = ()
    trouble: str = ""


class Library(NamedTuple):
    """A CUDA library of numba-cuda's: its CUDA version, () if unknown, as text, and why it cannot be loaded."""

    version: tuple[int, ...] = ()
    shown: str = ""
    trouble: str = ""


class Caches(NamedTuple):
    """Where compiled code can be kept for other processes, or None; False where CUDA's is switched off."""

    kernels: Path | None
    cuda: Path | bool | None


@dataclass(frozen=True)
class Facts:
    """All that the probes found."""

    driver: Driver | None = None
    packages: dict[str, str | None] = field(default_factory=dict)
    torch_cuda: tuple[int, ...] = ()  # () for a build without CUDA
    devices: tuple[torch.device, ...] = ()  # that torch can use, one of each model
    torch_trouble: str = ""  # why torch cannot use any
    libraries: dict[str, Library] = field(default_factory=dict)
    simulated: bool = False
    caches: Caches | None = None
    unimportable: dict[str, str] = field(default_factory=dict)  # modules, and why
    stopped: dict[str, str] = field(default_factory=dict)  # probes that failed, and why

    @property
    def gpus(self) -> tuple[Gpu, ...]:
        return self.driver.gpus if self.driver else ()


def attempt(function, *args):
    """(what the function gives, ""), or (None, why it failed, in one line)."""
    try:
        return function(*args), ""
    except Exception as error:
        return None, cause(error)


def cause(error) -> str:
    """An exception in one line of bearable length."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__


def gather() -> Facts:
    """Ask every probe; one that fails leaves the fact's default, and its cause."""
    probes = {
        "driver": driver,
        "packages": packages,
        "torch_cuda": lambda: numbers(torch.version.cuda or ""),
        "libraries": libraries,
        "simulated": simulated,
        "caches": caches,
    }
    found, stopped = {}, {}
    for name, probe in probes.items():
        value, trouble = attempt(probe)
        if trouble:
            stopped[name] = trouble
        else:
            found[name] = value
    devices, trouble = attempt(torch_devices)
    facts = Facts(**found, devices=devices or (), torch_trouble=trouble, stopped=stopped)
    return dataclasses.replace(facts, unimportable=unimportable("numba", "numba.cuda") if facts.gpus else unimportable("numba"))


def numbers(version) -> tuple[int, ...]:
    """The release of a version: (2, 13, 0) of "2.13.0+cpu"."""
    return tuple(map(int, re.match(r"(?:\d+\.)*\d+|", version)[0].replace(".", " ").split()))


def dotted(version) -> str:
    return ".".join(map(str, version))


def driver() -> Driver | None:
    """What the driver's own library says, or None without one; neither torch nor numba-cuda, which may not fit, is asked."""
    library = shared_library("nvcuda.dll", "libcuda.so.1")
    if library is None:
        return None
    version = ctypes.c_int()
    library.cuDriverGetVersion(ctypes.byref(version))
    served = version.value // 1000, version.value % 1000 // 10
    release = attempt(driver_release)[0] or "of unknown release"
    status, count = library.cuInit(0), ctypes.c_int()
    if status == 0:
        status = library.cuDeviceGetCount(ctypes.byref(count))
    no_device = 100
    if status not in (0, no_device):
        name = ctypes.c_char_p()
        library.cuGetErrorName(status, ctypes.byref(name))
        return Driver(release, served, trouble=(name.value or b"").decode() or f"CUDA error {status}")
    return Driver(release, served, tuple(gpu(library, index) for index in range(count.value)))


def gpu(library, index) -> Gpu:
    device, memory, name = ctypes.c_int(), ctypes.c_size_t(), ctypes.create_string_buffer(256)
    library.cuDeviceGet(ctypes.byref(device), index)
    library.cuDeviceGetName(name, len(name), device)
    library.cuDeviceTotalMem_v2(ctypes.byref(memory), device)
    attributes = []
    for number in (75, 76, 16):  # compute capability, major and minor; multiprocessors
        value = ctypes.c_int()
        library.cuDeviceGetAttribute(ctypes.byref(value), number, device)
        attributes.append(value.value)
    major, minor, multiprocessors = attributes
    return Gpu(name.value.decode(), (major, minor), memory.value, multiprocessors)


def driver_release() -> str:
    library, text = shared_library("nvml.dll", "libnvidia-ml.so.1"), ctypes.create_string_buffer(96)
    library.nvmlInit_v2()
    library.nvmlSystemGetDriverVersion(text, len(text))
    library.nvmlShutdown()
    return text.value.decode()


def shared_library(on_windows, elsewhere):
    """The library, or None where the machine has none."""
    try:
        return ctypes.CDLL(on_windows if sys.platform == "win32" else elsewhere)
    except OSError:
        return None


def packages() -> dict[str, str | None]:
    """The versions of what is installed, None for what is not."""
    return {name: package(name) for name in SHOWN} | {"torch": torch.__version__}


def package(name) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def torch_devices() -> tuple[torch.device, ...]:
    """A CUDA device of each model that torch can use; raises what keeps it from any."""
    if torch.version.cuda is None:
        return ()
    torch.cuda.init()
    models = {}
    for index in range(torch.cuda.device_count()):
        models.setdefault(torch.cuda.get_device_name(index), torch.device("cuda", index))
    return tuple(models.values())


def libraries() -> dict[str, Library]:
    """What numba-cuda compiles with."""
    found = {}
    for name, probe in {"NVVM": nvvm, "nvJitLink": nvjitlink, "NVRTC": nvrtc}.items():
        library, trouble = attempt(probe)
        found[name] = library or Library(trouble=trouble)
    return found


def nvvm() -> Library:
    from cuda.bindings import __version__, nvvm

    own = dotted(nvvm.version())
    name = NVVM.get(numbers(__version__)[0], "")
    version = package(name) if name else None
    return Library(numbers(version), f"{version} ({name})") if version else Library(shown=f"libNVVM {own}")


def nvjitlink() -> Library:
    from cuda.bindings import nvjitlink

    version = tuple(nvjitlink.version())
    return Library(version, dotted(version))


def nvrtc() -> Library:
    """numba-cuda asks it which architectures there are."""
    from cuda.bindings import nvrtc

    status, *version = nvrtc.nvrtcVersion()
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise RuntimeError(status.name)
    return Library(tuple(version), dotted(version))


def unimportable(*modules) -> dict[str, str]:
    """Why the first of the modules that cannot be imported cannot."""
    for name in modules:
        _, trouble = attempt(importlib.import_module, name)
        if trouble:
            return {name: trouble}
    return {}


def simulated() -> bool:
    """Whether Numba's CUDA simulator is on: by the environment, or by a file of settings."""
    try:
        from numba import config
    except Exception:
        return os.environ.get("NUMBA_ENABLE_CUDASIM", "") not in ("", "0")
    return bool(config.ENABLE_CUDASIM)


def caches() -> Caches:
    kernels = attempt(cache.place)[0]
    fits = kernels and usable(kernels) and (not kernels.exists() or cache.private(kernels.stat()))
    cuda = Path(os.environ.get("CUDA_CACHE_PATH") or os.path.expanduser("~/.nv/ComputeCache"))
    off = os.environ.get("CUDA_CACHE_DISABLE", "") not in ("", "0")
    return Caches(kernels if fits else None, False if off else cuda if usable(cuda) else None)


def usable(folder: Path) -> bool:
    """Whether files can be written there, or the folder can be made; leaves nothing behind."""
    try:
        existing = next(place for place in (folder, *folder.absolute().parents) if place.exists())
        with tempfile.TemporaryFile(dir=existing):
            return True
    except OSError:
        return False
