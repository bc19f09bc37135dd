"""What does not fit together, and what mends it: functions of facts alone."""

import re
from dataclasses import dataclass

from numba_impl import gpu as cuda_support
from numba_impl.doctor.probes import NVVM, Caches, Facts, Library, dotted, numbers

ERROR, WARNING = "error", "warning"

# The versions that setup.cfg asks for: at least, below.
BOUNDS = {
    "torch": ((2, 9), ()),
    "numba": ((0, 68), (0, 69)),
    "numba-cuda": ((0, 30, 4), (0, 31)),
    "numpy": ((), (2, 5)),
}

# torch's releases whose builds on PyPI are for a CUDA major, as in the Makefile.
TORCH = {12: "torch>=2.9,<2.11", 13: "torch>=2.11"}

REPORT = "report this output"
FIRST = "first mend what is said above"
PTX_TOO_NEW = re.compile(r"unsupported.*\.version|UNSUPPORTED_PTX_VERSION|unsupported toolchain", re.IGNORECASE)


@dataclass(frozen=True)
class Finding:
    """What is wrong, and the one command or action that mends it."""

    level: str
    text: str
    remedy: str


def errors(findings) -> int:
    return sum(finding.level == ERROR for finding in findings)


def installation_findings(facts: Facts) -> list[Finding]:
    """What does not fit together; what concerns a GPU, only where there is one."""
    findings = [] if "packages" in facts.stopped else version_findings(facts.packages)
    findings += simulator_findings(facts.simulated)
    if facts.driver and facts.driver.trouble:
        findings += driver_failures(facts.driver.trouble)
    if facts.gpus:
        findings += gpu_findings(facts)
    if facts.caches and facts.gpus:
        findings += cache_findings(facts.caches)
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


def cache_findings(caches: Caches) -> list[Finding]:
    """No place to keep compiled code: every process compiles anew."""
    places = {
        "compiled kernels have no cache directory that the user can write, and no other": (caches.kernels, "NUMBA_CACHE_DIR"),
        "CUDA has no cache directory that can be written": (caches.cuda, "CUDA_CACHE_PATH"),
    }
    return [Finding(WARNING, text, f"set {variable} to one") for text, (place, variable) in places.items() if place is None]


def failure_remedy(problem, libraries) -> str:
    """What mends a backend that fails or is wrong."""
    nvjitlink = libraries.get("nvJitLink", Library()).version
    return matching_nvvm(nvjitlink) if nvjitlink and PTX_TOO_NEW.search(problem) else REPORT
