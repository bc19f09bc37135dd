"""What is installed, what does not fit together and the command that mends it, and whether each backend is right.

``python -m numba_impl doctor`` prints it and exits 1 after an error: a backend that fails or is wrong, or an installation that
keeps a GPU's kernels from running. A warning is what works all the same, slower or by eager PyTorch: no directory for compiled
kernels, a GPU too old for them. It leaves the status at 0, as does a backend that declines, for the reason that it gives to
dispatch. What concerns a GPU alone is no error on a machine without one.
"""

import importlib
import os
import platform
import re
import tempfile
import time
import warnings
from importlib import metadata
from typing import NamedTuple
from unittest import mock

import torch
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from torch.utils import collect_env

from numba_impl import dispatch, functional, gpu, oracle
from numba_impl.arguments import PRECISIONS
from numba_impl.case import Case
from numba_impl.cuda import cache
from numba_impl.epilogue import Constants

ERROR, WARNING = "error", "warning"
REPORT, FIRST, REINSTALL = "report this output", "first mend what is said above", "--force-reinstall "
TORCH = {12: "torch<2.11", 13: "torch>=2.11"}  # the releases whose builds on PyPI are for a CUDA major, as in the Makefile
NVVM = {12: "nvidia-cuda-nvcc-cu12", 13: "nvidia-nvvm"}  # the package of NVVM: the library does not tell its CUDA version
PTX_TOO_NEW = re.compile(r"unsupported.*\.version|UNSUPPORTED_PTX_VERSION|unsupported toolchain", re.IGNORECASE)
RESTART = "restart the machine, or the container with its GPUs, until nvidia-smi lists them"
NO_START = {
    "CUDA_ERROR_STUB_LIBRARY": "take the folder 'stubs' of the CUDA toolkit out of LD_LIBRARY_PATH",
    "CUDA_ERROR_SYSTEM_NOT_READY": "sudo systemctl start nvidia-fabricmanager",
    "CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE": "take the folder of cuda-compat out of LD_LIBRARY_PATH",
}
CASE, SETTINGS, CONSTANTS = Case((2, 16, 9, 12), 16, 3, 2, 1, 1), (2, 1, 1), Constants(add_value=0.25, scale=2.0)


class Finding(NamedTuple):
    """What is wrong, and the one command or action that mends it."""

    level: str
    text: str
    remedy: str


class Failure(NamedTuple):
    """Stands for what could not be found or done, and is as false as what is not there."""

    why: str

    def __bool__(self):
        return False


def main() -> int:
    """Print the report; return the exit status."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the report says the same, once
        findings = check_installation()
        print()
        # In an empty directory no kernel is kept: the compiler is to be checked.
        with tempfile.TemporaryDirectory() as empty, mock.patch.dict(os.environ, NUMBA_CACHE_DIR=empty):
            findings += check_backends(FIRST if errors(findings) else "")
    print()
    for finding in findings:
        print(f"{finding.level}: {finding.text}\n    {finding.remedy}")
    print(f"errors: {errors(findings)}, warnings: {len(findings) - errors(findings)}" if findings else "nothing is wrong")
    return 1 if errors(findings) else 0


def errors(findings) -> int:
    return sum(finding.level == ERROR for finding in findings)


def say(label, text):
    print(f"{label:<14} {text}", flush=True)


def attempt(function, *args):
    """Return what the function gives, or a Failure with its error in one line of bearable length."""
    try:
        return function(*args)
    except Exception as error:
        text = " ".join(str(error).split())
        return Failure(f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__)


# What does not fit together


def check_installation() -> list[Finding]:
    """Print what is there; return what does not fit together."""
    found = attempt(driver)
    cuda, count, trouble = found or ((), 0, found.why)
    release = attempt(collect_env.get_nvidia_driver_version, collect_env.run) or "of unknown release"
    about = f"{release}, serves CUDA {dotted(cuda)}" if cuda else "none"
    say("driver", about if count else f"{about}, and so no GPU: the CPU alone is checked")
    findings = [Finding(ERROR, f"the driver does not start: {trouble}", NO_START.get(trouble, RESTART))] if trouble else []
    say("python", platform.python_version())
    findings += check_packages()
    say("torch is built", f"for CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA")
    findings += [*(check_gpus(cuda) if count else []), *check_libraries(count)]
    numba = attempt(importlib.import_module, "numba.cuda" if count else "numba")
    if isinstance(numba, Failure):
        remedy = FIRST if errors(findings) else pip("numba", "numba-cuda", "numpy", option=REINSTALL)
        findings.append(Finding(ERROR, f"numba cannot be imported: {numba.why}", remedy))
    elif importlib.import_module("numba").config.ENABLE_CUDASIM:
        text = "Numba's CUDA simulator is on: kernels run neither on the GPU nor at speed"
        findings.append(Finding(ERROR, text, "unset NUMBA_ENABLE_CUDASIM"))
    return findings


def check_packages():
    wanted = required()
    for name in ("numba-impl", "torch", "numba", "numba-cuda", "numpy", "cuda-core", "cuda-bindings"):
        version, versions = installed(name), wanted.get(name, SpecifierSet())
        say(name, version or "not installed")
        if name in wanted and version is None:
            yield Finding(ERROR, f"{name} is not installed", pip(name))
        elif version and not versions.contains(version, prereleases=True):
            yield Finding(ERROR, f"{name} {version} does not fit: {versions} is asked for", pip(name))


def check_gpus(served):
    """The driver and torch have to be of one CUDA major, and the GPUs new enough for the kernels."""
    built, found = numbers(torch.version.cuda or ""), attempt(gpus)
    if not built:
        yield Finding(ERROR, "torch is built without CUDA, and there is a GPU", install(served[0], REINSTALL))
    elif served[0] < built[0]:  # a driver runs what is built for its own major, whatever the minor, and for earlier ones
        text = f"the driver serves CUDA {dotted(served)}, too old for the PTX and code of torch's CUDA {dotted(built)}"
        yield Finding(ERROR, text, install(served[0]))
    elif not found:
        why = found.why if isinstance(found, Failure) else "it shows none"
        yield Finding(ERROR, f"torch cannot use the GPU: {why}", install(built[0], REINSTALL))
    for index, each in enumerate(found or ()):
        name, least = f"{each.name}, compute capability {each.major}.{each.minor}", dotted(gpu.MINIMUM_CAPABILITY)
        say(f"GPU {index}", f"{name}, {each.total_memory / 2**30:.0f} GiB, {each.multi_processor_count} multiprocessors")
        if (each.major, each.minor) < gpu.MINIMUM_CAPABILITY:
            text = f"GPU {index}, {name}, is below {least}: eager PyTorch serves it"
            yield Finding(WARNING, text, f"use a GPU of compute capability {least} or more")
    place = attempt(kept)
    say("kernels' cache", place or "nowhere")
    if not place:
        yield Finding(WARNING, f"compiled kernels are not kept: {place.why}", "set NUMBA_CACHE_DIR to a directory of your own")


def check_libraries(needed):
    """The compiler libraries have to be there, of torch's CUDA major, and the linker has to read what the compiler writes."""
    versions, built = libraries(), numbers(torch.version.cuda or "")
    missing = [name for name, version in versions.items() if isinstance(version, Failure)]
    for name, version in versions.items():
        unloaded = "cannot be loaded" if needed else "cannot be loaded, and only a GPU needs it"
        say(name, unloaded if name in missing else dotted(version) or "of an unknown CUDA version")
    if not needed or not built:
        return
    remedy = pip("torch", f"numba-cuda[cu{built[0]}]")  # torch is named so that pip heeds which libraries it pins
    others = [f"{name} {dotted(version)}" for name, version in versions.items() if version and version[0] != built[0]]
    if missing:
        yield Finding(ERROR, f"{', '.join(missing)} cannot be loaded: {versions[missing[0]].why}", remedy)
    elif others:
        text = f"torch is built for CUDA {dotted(built)}, and numba-cuda's libraries are of another: {', '.join(others)}"
        yield Finding(ERROR, text, remedy)
    elif versions["NVVM"][:2] > versions["nvJitLink"][:2]:
        text = f"NVVM {dotted(versions['NVVM'])} writes PTX that is too new for nvJitLink {dotted(versions['nvJitLink'])}"
        yield Finding(ERROR, text, older_nvvm(versions["nvJitLink"]))


# Commands that mend it


def required() -> dict[str, SpecifierSet]:
    """Return the versions that this package asks for, from its own metadata; {} where it is not installed."""
    lines = metadata.requires("numba-impl") if installed("numba-impl") else []
    return {each.name: each.specifier for each in map(Requirement, lines) if not each.marker}


def pip(*packages, option="") -> str:
    """Return the command that installs packages in versions that this one asks for."""
    wanted, bounds = [Requirement(package) for package in packages], required()
    for each in wanted:
        each.specifier &= bounds.get(each.name, SpecifierSet())
    return f"pip install {option}" + " ".join(f"'{each}'" for each in wanted)


def install(major, option="") -> str:
    """Return the command that installs everything for a driver's or torch's CUDA major."""
    if major < min(TORCH):
        return f"update the NVIDIA driver to one that serves CUDA {max(TORCH)}"
    major = min(major, max(TORCH))
    return pip(TORCH[major], f"numba-cuda[cu{major}]", "numpy", option=option)


def own_remedy(failure) -> str:
    """Return what mends a backend that fails or is wrong."""
    nvjitlink = libraries()["nvJitLink"]
    return older_nvvm(nvjitlink) if nvjitlink and PTX_TOO_NEW.search(failure) else REPORT


def older_nvvm(nvjitlink) -> str:
    """Return the command that installs an NVVM whose PTX nvJitLink reads: that of its own release or of an earlier one."""
    return f"pip install '{NVVM.get(nvjitlink[0], NVVM[13])}=={dotted(nvjitlink[:2])}.*'"


# What is there


def numbers(version) -> tuple[int, ...]:
    """Return the release of a version: (2, 13, 0) of "2.13.0+cpu"."""
    return tuple(map(int, re.match(r"(?:\d+\.)*\d+|", version)[0].replace(".", " ").split()))


def dotted(version) -> str:
    return ".".join(map(str, version))


def installed(name) -> str | None:
    return torch.__version__ if name == "torch" else next((each.version for each in metadata.distributions(name=name)), None)


def driver() -> tuple[tuple[int, ...], int, str]:
    """Return the CUDA version that the driver serves, () without one; how many GPUs it shows; why it does not start."""
    try:
        from cuda.bindings import driver

        _, version = driver.cuDriverGetVersion()
    except (ImportError, RuntimeError):
        return (), 0, ""
    served, (status,) = (version // 1000, version % 1000 // 10), driver.cuInit(0)
    if status == driver.CUresult.CUDA_SUCCESS:
        return served, driver.cuDeviceGetCount()[1], ""
    return served, 0, "" if status == driver.CUresult.CUDA_ERROR_NO_DEVICE else status.name


def gpus() -> list:
    """Return torch's properties of those that it can use. Raises what keeps it from them."""
    if not torch.version.cuda:
        return []
    torch.cuda.init()
    return [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]


def libraries() -> dict[str, tuple[int, ...] | Failure]:
    """Return the CUDA versions of what numba-cuda compiles with, () for one that is unknown."""

    def bindings(name):
        return importlib.import_module(f"cuda.bindings.{name}")

    def nvvm():
        bindings("nvvm").version()  # raises if it cannot be loaded
        major, *_ = numbers(installed("cuda-bindings"))
        return numbers(installed(NVVM.get(major, NVVM[13])) or "")

    found = {
        "NVVM": nvvm,
        "nvJitLink": lambda: tuple(bindings("nvjitlink").version()),
        "NVRTC": lambda: bindings("nvrtc").nvrtcVersion()[1:],
    }
    return {name: attempt(version) for name, version in found.items()}


def kept():
    """Return the directory of compiled kernels. Raises OSError or RuntimeError where none can be kept."""
    with tempfile.TemporaryFile(dir=cache.folder()):
        return cache.folder()


# Whether each backend is right


def check_backends(remedy) -> list[Finding]:
    """Print how every backend does; return what is wrong. ``remedy`` stands for its own where earlier findings explain it."""
    generator, findings = torch.Generator().manual_seed(0), []
    tensors, gy = CASE.draw(generator=generator), torch.randn(CASE.output_shape, generator=generator)
    sample = *tensors, oracle.clear_of_edges(gy, *tensors, CASE.geometry, CONSTANTS, "tf32")
    of_each_model = {each.name: torch.device("cuda", index) for index, each in enumerate(attempt(gpus) or ())}
    for name in dispatch.BACKENDS:
        for device in of_each_model.values() if of_each_model and name != "cpu" else [torch.device("cpu")]:
            for precision in PRECISIONS:
                line, wrong = check_backend(name, device, precision, sample)
                say(name, f"{precision} on {device}: {line}")
                if wrong:
                    findings.append(Finding(ERROR, f"{name} in {precision} on {device}: {wrong}", remedy or own_remedy(wrong)))
    return findings


def check_backend(name, device, precision, sample) -> tuple[str, str]:
    """Return how a backend does, in one line with the seconds of its first calls, which compile; and what is wrong."""
    if reason := attempt(why_not, name, device, precision, sample):  # what fails here fails below, too
        return f"declined, {reason}", ""
    line, wrong = [], []
    for check in (forward, backward):
        start = time.perf_counter()
        failure = attempt(check, name, device, precision, sample)
        outcome = f"{check.__name__} {'ok' if failure is None else failure.why}"
        line.append(f"{outcome} ({time.perf_counter() - start:.1f} s)")
        if failure is not None:
            wrong.append(outcome)
    return ", ".join(line), ", ".join(wrong)


def why_not(name, device, precision, sample) -> str:
    x, weight, bias, _ = (t.to(device) for t in sample)
    return dispatch.BACKENDS[name].why_not(functional.describe(x, weight, bias, *SETTINGS, precision))


def forward(name, device, precision, sample):
    """Compile and run. Raises oracle.Wrong if the result is further from float64 than rounding explains."""
    *tensors, _ = sample
    with torch.no_grad():
        y = layer(*(t.to(device) for t in tensors), name, precision)
    oracle.check_layer(y.cpu(), *tensors, CASE.geometry, CONSTANTS, precision)


def backward(name, device, precision, sample):
    """The same for the gradients of x, weight and bias."""
    *tensors, gy = sample
    with torch.enable_grad():
        leaves = [t.to(device, copy=True).requires_grad_() for t in tensors]
        gradients = torch.autograd.grad(layer(*leaves, name, precision), leaves, gy.to(device))
    truth = oracle.Gradients.of(*sample, CASE.geometry, CONSTANTS, precision)
    truth.check([gradient.cpu() for gradient in gradients])


def layer(x, weight, bias, name, precision):
    choices = dict(add_value=CONSTANTS.add_value, scale=CONSTANTS.scale, precision=precision, backend=name)
    return functional.conv_transpose2d_mish_add_hardtanh_scale(x, weight, bias, *SETTINGS, **choices)
