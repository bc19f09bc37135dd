"""What is installed, what does not fit together and what mends it, and whether each backend computes what it should.

``python -m numba_impl doctor`` prints it and exits 1 after an error: a backend that fails or is wrong, or an installation
that keeps a GPU's kernels from running. A warning is what works all the same, slower or by eager PyTorch: no directory for a
cache, a GPU too old for the kernels. It leaves the status at 0, as does a backend that declines, for the reason it gives to
dispatch, and all that concerns a GPU alone on a machine without one.

A probe gives facts, and never raises: ``attempt`` makes one line of what stopped it. Findings are functions of facts alone.
"""

import ctypes
import dataclasses
import functools
import importlib
import importlib.metadata
import os
import platform
import re
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch

from numba_impl import cuda_support, dispatch, functional, reference
from numba_impl.problem import PRECISIONS, Constants, Geometry

ERROR, WARNING = "error", "warning"

# The versions that setup.cfg asks for: at least, below.
BOUNDS = {
    "torch": ((2, 9), ()),
    "numba": ((0, 68), (0, 69)),
    "numba-cuda": ((0, 30, 4), (0, 31)),
    "numpy": ((), (2, 5)),
}
SHOWN = "torch", "numba", "numba-cuda", "numpy", "cuda-core", "cuda-bindings"

# torch's releases whose builds on PyPI are for a CUDA major, as in the Makefile.
TORCH = {12: "torch>=2.9,<2.11", 13: "torch>=2.11"}
# The package that brings NVVM: the library does not tell its CUDA version.
NVVM = {12: "nvidia-cuda-nvcc-cu12", 13: "nvidia-nvvm"}

REPORT = "report this output"
FIRST = "first mend what is said above"
PTX_TOO_NEW = re.compile(r"unsupported.*\.version|UNSUPPORTED_PTX_VERSION|unsupported toolchain", re.IGNORECASE)


@dataclass(frozen=True)
class Finding:
    """What is wrong, and the one command or action that mends it."""

    level: str
    text: str
    remedy: str


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

    numba: Path | None
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


def main() -> int:
    """Print what there is to say; gives the exit status."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what they say is said here, once
        facts = gather()
        for label, text in rows(facts):
            say(label, text)
        print()
        findings = installation_findings(facts)
        findings += check_backends(facts, FIRST if errors(findings) else "")
    print()
    for finding in findings:
        print(f"{finding.level}: {finding.text}\n    {finding.remedy}")
    wrong = errors(findings)
    print(f"errors: {wrong}, warnings: {len(findings) - wrong}" if findings else "nothing is wrong")
    return 1 if wrong else 0


def say(label, text):
    print(f"{label:<14} {text}", flush=True)


def errors(findings) -> int:
    return sum(finding.level == ERROR for finding in findings)


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


# Probes


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
    """Numba takes the first directory that it can write: the one it is told, the package's own, the user's."""
    told = os.environ.get("NUMBA_CACHE_DIR")
    places = [told, Path(__file__).parent / "__pycache__", attempt(user_cache)[0]]
    cuda = os.environ.get("CUDA_CACHE_PATH") or os.path.expanduser("~/.nv/ComputeCache")
    off = os.environ.get("CUDA_CACHE_DISABLE", "") not in ("", "0")
    return Caches(first_usable(places), False if off else first_usable([cuda]))


def user_cache() -> str:
    from numba.misc.appdirs import AppDirs

    return AppDirs("numba", appauthor=False).user_cache_dir


def first_usable(places) -> Path | None:
    return next((Path(place) for place in places if place and usable(Path(place))), None)


def usable(folder: Path) -> bool:
    """Whether files can be written there, or the folder can be made; leaves nothing behind."""
    try:
        existing = next(place for place in (folder, *folder.absolute().parents) if place.exists())
        with tempfile.TemporaryFile(dir=existing):
            return True
    except OSError:
        return False


# What is printed of the facts


def rows(facts: Facts):
    """(label, text) of each fact."""
    yield "driver", driver_text(facts)
    for index, gpu in enumerate(facts.gpus):
        size = f"{gpu.memory / 2**30:.0f} GiB, {gpu.multiprocessors} multiprocessors"
        yield f"GPU {index}", f"{gpu.name}, compute capability {dotted(gpu.capability)}, {size}"
    yield "python", platform.python_version()
    built = f"for CUDA {dotted(facts.torch_cuda)}" if facts.torch_cuda else "without CUDA"
    for name, version in facts.packages.items():
        yield name, f"{version}, built {built}" if name == "torch" else version or "not installed"
    for name, library in facts.libraries.items():
        yield name, library.shown or ("cannot be loaded" if facts.gpus else "cannot be loaded, and only a GPU needs it")
    yield "simulator", "on" if facts.simulated else "off"
    if facts.caches:
        yield "Numba's cache", facts.caches.numba or "nowhere"
        if facts.gpus:
            yield "CUDA's cache", "switched off" if facts.caches.cuda is False else facts.caches.cuda or "nowhere"


def driver_text(facts) -> str:
    if facts.driver is None:
        return "none, and so no GPU: the CPU alone is checked"
    text = f"{facts.driver.release}, serves CUDA {dotted(facts.driver.cuda)}"
    return text if facts.gpus else f"{text}, but shows no GPU: the CPU alone is checked"


# Findings


def installation_findings(facts: Facts) -> list[Finding]:
    """What does not fit together; what concerns a GPU, only where there is one."""
    findings = [] if "packages" in facts.stopped else version_findings(facts.packages)
    findings += simulator_findings(facts.simulated)
    if facts.driver and facts.driver.trouble:
        findings += driver_failures(facts.driver.trouble)
    if facts.gpus:
        findings += gpu_findings(facts)
    if facts.caches:
        findings += cache_findings(facts.caches, bool(facts.gpus))
    findings += import_findings(facts.unimportable, explained=errors(findings))
    return findings + [Finding(ERROR, f"asking for {name} failed: {why}", REPORT) for name, why in facts.stopped.items()]


def gpu_findings(facts: Facts) -> list[Finding]:
    """Of a machine with a GPU: the driver, torch and the libraries have to be of one CUDA major."""
    findings = capability_findings(facts.gpus)
    if not facts.torch_cuda:
        return findings + [torch_without_cuda(facts.driver.cuda)]
    too_old = driver_findings(facts.driver.cuda, facts.torch_cuda)
    if not too_old and not facts.devices:
        text = f"torch cannot use the GPU: {facts.torch_trouble or 'it shows none'}"
        too_old = [Finding(ERROR, text, install(facts.torch_cuda[0], "--force-reinstall "))]
    return findings + too_old + library_findings(facts.libraries, facts.torch_cuda)


def version_findings(installed) -> list[Finding]:
    """Packages that are missing, or outside what setup.cfg asks for."""
    findings = []
    for name, (least, below) in BOUNDS.items():
        version = installed.get(name)
        if version is None:
            findings.append(Finding(ERROR, f"{name} is not installed", f"pip install '{bounded(name)}'"))
        elif numbers(version) < least or (below and numbers(version) >= below):
            why = ": numba-cuda 0.30 calls np.row_stack, which NumPy 2.5 removed" if name == "numpy" else ""
            findings.append(Finding(ERROR, f"{name} {version} does not fit{why}", f"pip install '{bounded(name)}'"))
    return findings


def bounded(name, extra="") -> str:
    """A package within its bounds, as pip takes it."""
    least, below = BOUNDS[name]
    bounds = [sign + dotted(version) for sign, version in ((">=", least), ("<", below)) if version]
    return f"{name}{extra}{','.join(bounds)}"


def import_findings(unimportable, explained) -> list[Finding]:
    remedy = f"pip install --force-reinstall '{bounded('numba')}' '{bounded('numba-cuda')}' '{bounded('numpy')}'"
    return [
        Finding(ERROR, f"{name} cannot be imported: {why}", FIRST if explained else remedy) for name, why in unimportable.items()
    ]


def simulator_findings(simulated) -> list[Finding]:
    text = "Numba's CUDA simulator is on: kernels run neither on the GPU nor at speed"
    return [Finding(ERROR, text, "unset NUMBA_ENABLE_CUDASIM")] if simulated else []


def driver_failures(trouble) -> list[Finding]:
    """The driver's library is there, and does not start."""
    remedies = {
        "CUDA_ERROR_STUB_LIBRARY": "take the folder 'stubs' of the CUDA toolkit out of LD_LIBRARY_PATH",
        "CUDA_ERROR_SYSTEM_NOT_READY": "sudo systemctl start nvidia-fabricmanager",
        "CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE": "take the folder of cuda-compat out of LD_LIBRARY_PATH",
    }
    remedy = remedies.get(trouble, "restart the machine, or the container with its GPUs, until nvidia-smi lists them")
    return [Finding(ERROR, f"the driver does not start: {trouble}", remedy)]


def driver_findings(served, needed) -> list[Finding]:
    """A driver runs what is built for its own CUDA major, of whatever minor, and for earlier majors."""
    if served[0] >= needed[0]:
        return []
    text = f"the driver serves CUDA {dotted(served)}, too old for torch's CUDA {dotted(needed)}: PTX and code are too new for it"
    return [Finding(ERROR, text, install(served[0]))]


def torch_without_cuda(served) -> Finding:
    return Finding(ERROR, "torch is built without CUDA, and there is a GPU", install(served[0], "--force-reinstall "))


def install(major, option="") -> str:
    """The command that installs everything for a driver's or torch's CUDA major; the bounds keep pip from what does not fit."""
    if major < min(TORCH):
        return f"update the NVIDIA driver to one that serves CUDA {max(TORCH)}"
    major = min(major, max(TORCH))
    return f"pip install {option}'{TORCH[major]}' '{bounded('numba-cuda', f'[cu{major}]')}' '{bounded('numpy')}'"


def library_findings(libraries, torch_cuda) -> list[Finding]:
    """The compiler libraries are there, of torch's CUDA major, and the linker reads what the compiler writes."""
    # torch, which is installed, is named so that pip heeds which libraries it pins
    remedy = f"pip install torch '{bounded('numba-cuda', f'[cu{torch_cuda[0]}]')}'"
    missing = {name: library.trouble for name, library in libraries.items() if library.trouble}
    if missing:
        return [Finding(ERROR, f"{', '.join(missing)} cannot be loaded: {next(iter(missing.values()))}", remedy)]
    versions = {name: library.version for name, library in libraries.items() if library.version}
    others = [f"{name} {dotted(version)}" for name, version in versions.items() if version[0] != torch_cuda[0]]
    if others:
        text = f"torch is built for CUDA {dotted(torch_cuda)}, and numba-cuda's libraries are of another: {', '.join(others)}"
        return [Finding(ERROR, text, remedy)]
    return linker_findings(versions.get("NVVM", ()), versions.get("nvJitLink", ()))


def linker_findings(nvvm, nvjitlink) -> list[Finding]:
    """nvJitLink reads the PTX of its own release and of earlier ones."""
    if not nvvm or not nvjitlink or nvvm[:2] <= nvjitlink[:2]:
        return []
    text = f"NVVM {dotted(nvvm)} writes PTX that is too new for nvJitLink {dotted(nvjitlink)}"
    return [Finding(ERROR, text, matching_nvvm(nvjitlink))]


def matching_nvvm(nvjitlink) -> str:
    return f"pip install '{NVVM.get(nvjitlink[0], 'nvidia-nvvm')}=={dotted(nvjitlink[:2])}.*'"


def capability_findings(gpus) -> list[Finding]:
    least = dotted(cuda_support.MINIMUM_CAPABILITY)
    return [
        Finding(
            WARNING,
            f"GPU {index}, {gpu.name}, has compute capability {dotted(gpu.capability)}, below {least}: eager PyTorch serves it",
            f"use a GPU of compute capability {least} or more",
        )
        for index, gpu in enumerate(gpus)
        if gpu.capability < cuda_support.MINIMUM_CAPABILITY
    ]


def cache_findings(caches: Caches, has_gpu) -> list[Finding]:
    """No place to keep compiled code: every process compiles anew."""
    places = {"Numba": (caches.numba, "NUMBA_CACHE_DIR")}
    if has_gpu:
        places["CUDA"] = caches.cuda, "CUDA_CACHE_PATH"
    return [
        Finding(WARNING, f"{owner} has no cache directory that can be written", f"set {variable} to one")
        for owner, (place, variable) in places.items()
        if place is None
    ]


# Backends


class Sample(NamedTuple):
    """A small call that every backend serves, and its results in float64: of the forward, of the backward."""

    inputs: tuple[torch.Tensor, ...]  # x, weight, bias
    gy: torch.Tensor
    results: tuple[torch.Tensor]
    gradients: tuple[torch.Tensor, ...]


SETTINGS = dict(stride=2, padding=1, output_padding=1)
CONSTANTS = Constants(add_value=0.25, scale=2.0)
TOLERANCE = {"fp32": 2e-5, "tf32": 1e-2}  # of the largest value; TF32 keeps 11 bits of each factor
EDGE = 0.05  # nearer to the clamp's bounds than this, where the gradient jumps, none is asked for


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
    _, problem = functional.describe(*inputs, *SETTINGS.values(), precision)
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


def failure_remedy(problem, libraries) -> str:
    """What mends a backend that fails or is wrong."""
    nvjitlink = libraries.get("nvJitLink", Library()).version
    return matching_nvvm(nvjitlink) if nvjitlink and PTX_TOO_NEW.search(problem) else REPORT
