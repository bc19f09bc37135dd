"""``python -m numba_impl doctor``: what it says of this machine, and of installations and kernels that are broken."""

import configparser
import ctypes
import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from numba_impl import __main__
from numba_impl.backends import cpu as backend_cpu
from numba_impl.cuda import cache
from numba_impl.doctor import findings, probes, report
from numba_impl.doctor.probes import Caches, Driver, Facts, Gpu, Library
from tests.cases import IMPORTS

ROOT = Path(__file__).parent.parent
SECONDS = 300  # with a GPU it compiles every kernel

H200 = Gpu("NVIDIA H200", (9, 0), 140 * 2**30, 132)
PACKAGES = {"torch": "2.13.0+cu130", "numba": "0.68.1", "numba-cuda": "0.30.4", "numpy": "2.4.6"}
LIBRARIES = {
    name: Library(version, "13") for name, version in (("NVVM", (13, 0, 88)), ("nvJitLink", (13, 0)), ("NVRTC", (13, 0)))
}
GOOD = Facts(
    driver=Driver("580.159.04", (13, 0), (H200,)),
    packages=PACKAGES,
    torch_cuda=(13, 0),
    devices=(torch.device("cuda", 0),),
    libraries=LIBRARIES,
    caches=Caches(Path("/tmp"), Path("/tmp")),
)
WITHOUT_GPU = Facts(packages=PACKAGES, torch_trouble="RuntimeError: no driver", caches=Caches(Path("/tmp"), None))

CU12 = "'torch>=2.9,<2.11' 'numba-cuda[cu12]>=0.30.4,<0.31' 'numpy<2.5'"
CU13 = "'torch>=2.11' 'numba-cuda[cu13]>=0.30.4,<0.31' 'numpy<2.5'"


def run(folder, *flags, **environment):
    command = [sys.executable, *flags, "-m", "numba_impl", "doctor"]
    everything = os.environ | IMPORTS | environment
    return subprocess.run(command, cwd=folder, env=everything, capture_output=True, text=True, timeout=SECONDS)


def changed(**changes):
    return dataclasses.replace(GOOD, **changes)


def driver(cuda=(13, 0), gpus=(H200,), trouble=""):
    return Driver("1.2", cuda, gpus, trouble)


def without_version(**versions):
    return changed(packages=PACKAGES | {name.replace("_", "-"): version for name, version in versions.items()})


def with_libraries(**libraries):
    return changed(libraries=LIBRARIES | libraries)


def cuda12():
    return {name: Library((12, 9), "12.9") for name in LIBRARIES}


# The command


def test_the_command_without_a_gpu(tmp_path):
    done = run(tmp_path, "-W", "error", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0 and not done.stderr, done.stdout + done.stderr
    assert re.search(r"^driver .*the CPU alone is checked$", done.stdout, re.MULTILINE)
    assert re.search(r"^cpu +fp32 on cpu: forward ok \(\d+\.\d s\), backward ok \(\d+\.\d s\)$", done.stdout, re.MULTILINE)
    assert re.search(r"^tiled .*: declined, x is on cpu, not on a CUDA device$", done.stdout, re.MULTILINE)
    assert "Traceback" not in done.stdout and done.stdout.endswith("nothing is wrong\n")


@pytest.mark.gpu
def test_the_command_on_a_gpu(tmp_path):
    done = run(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    backends = ["tiled", "composite", "reference"] + ["hopper"] * (torch.cuda.get_device_capability() == (9, 0))
    for name in backends:
        assert re.search(rf"^{name} +fp32.* on cuda:0: forward ok \(.* s\), backward ok", done.stdout, re.MULTILINE), done.stdout
    assert re.search(r"^GPU 0 .*compute capability \d+\.\d, \d+ GiB, \d+ multiprocessors$", done.stdout, re.MULTILINE)


def test_a_broken_installation_gives_lines_and_no_traceback(tmp_path):
    """Numba's import fails as with a NumPy that is too new, that of the CUDA bindings as without them."""
    for package, line in {"numba": "raise AttributeError('no row_stack')", "cuda": "raise ImportError('no cuda')"}.items():
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text(line)
    done = run(tmp_path, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 1 and not done.stderr, done.stdout + done.stderr
    assert (
        "error: numba cannot be imported: AttributeError: no row_stack\n    pip install --force-reinstall 'numba>=" in done.stdout
    )
    cpu = "error: cpu in fp32 on cpu: forward AttributeError: no row_stack\n    first mend what is said above"
    assert cpu in done.stdout
    assert re.search(r"^NVVM +cannot be loaded, and only a GPU needs it$", done.stdout, re.MULTILINE)


def test_the_front_asks_for_a_command(capsys):
    with pytest.raises(SystemExit) as end:
        __main__.main([])
    assert end.value.code == 2 and "COMMAND" in capsys.readouterr().err


# What does not fit together

BROKEN = {
    "numpy": (without_version(numpy="2.5.0"), "error: numpy 2.5.0 .*row_stack", "pip install 'numpy<2.5'"),
    "numba": (without_version(numba="0.67.2"), "error: numba 0.67.2 does not fit", "pip install 'numba>=0.68,<0.69'"),
    "no numba-cuda": (
        without_version(numba_cuda=None),
        "error: numba-cuda is not installed",
        "pip install 'numba-cuda>=0.30.4,<0.31'",
    ),
    "torch": (without_version(torch="2.8.1"), "error: torch 2.8.1", "pip install 'torch>=2.9'"),
    "simulator": (changed(simulated=True), "error: .*simulator is on", "unset NUMBA_ENABLE_CUDASIM"),
    "libraries of CUDA 12": (
        changed(libraries=cuda12()),
        r"error: torch is built for CUDA 13\.0.*NVVM 12\.9, nvJitLink 12\.9, NVRTC 12\.9",
        "pip install torch 'numba-cuda[cu13]>=0.30.4,<0.31'",
    ),
    "torch of CUDA 12": (
        changed(torch_cuda=(12, 8)),
        r"error: torch is built for CUDA 12\.8.*NVVM 13\.0",
        "pip install torch 'numba-cuda[cu12]>=0.30.4,<0.31'",
    ),
    "old driver": (
        changed(driver=driver((12, 8)), devices=()),
        r"error: the driver serves CUDA 12\.8, too old",
        f"pip install {CU12}",
    ),
    "older driver": (
        changed(driver=driver((11, 4))),
        r"error: the driver serves CUDA 11\.4",
        "update the NVIDIA driver to one that",
    ),
    "stub": (
        changed(driver=driver(gpus=(), trouble="CUDA_ERROR_STUB_LIBRARY")),
        "error: the driver does not start: CUDA_ERROR_STUB_LIBRARY",
        "take the folder 'stubs'",
    ),
    "no NVVM": (
        with_libraries(NVVM=Library(trouble="ImportError: libnvvm.so not found")),
        "error: NVVM cannot be loaded: ImportError: libnvvm.so not found",
        "pip install torch 'numba-cuda[cu13]>=0.30.4,<0.31'",
    ),
    "NVVM newer than nvJitLink": (
        with_libraries(NVVM=Library((13, 2, 1), "13.2.1")),
        r"error: NVVM 13\.2\.1 writes PTX that is too new for nvJitLink 13\.0",
        "pip install 'nvidia-nvvm==13.0.*'",
    ),
    "torch without CUDA": (changed(torch_cuda=()), "error: torch is built without CUDA", f"pip install --force-reinstall {CU13}"),
    "torch sees no GPU": (
        changed(devices=(), torch_trouble="RuntimeError: broken"),
        "error: torch cannot use the GPU: RuntimeError: broken",
        f"pip install --force-reinstall {CU13}",
    ),
    "a probe that failed": (
        changed(stopped={"driver": "OSError: torn"}),
        "error: asking for driver failed: OSError: torn",
        "report",
    ),
    "no Numba": (
        changed(unimportable={"numba": "AttributeError: row_stack"}),
        "error: numba cannot be imported: AttributeError: row_stack",
        "pip install --force-reinstall 'numba>=0.68,<0.69' 'numba-cuda>=0.30.4,<0.31' 'numpy<2.5'",
    ),
    "old GPU": (
        changed(driver=driver(gpus=(H200._replace(name="T4", capability=(7, 5)),))),
        r"warning: GPU 0, T4, has compute capability 7\.5, below 8\.0",
        "use a GPU of compute capability 8.0 or more",
    ),
    "no cache": (changed(caches=Caches(None, Path("/tmp"))), "warning: compiled kernels have no cache", "set NUMBA_CACHE_DIR"),
    "no CUDA cache": (changed(caches=Caches(Path("/tmp"), None)), "warning: CUDA has no cache", "set CUDA_CACHE_PATH"),
}


@pytest.fixture
def diagnose(monkeypatch, capsys):
    """Gives (exit status, output) of the command where the probes find certain facts."""

    def diagnose(facts, backends=True):
        monkeypatch.setattr(report, "gather", lambda: facts)
        if not backends:
            monkeypatch.setattr(report, "check_backends", lambda facts, remedy: [])
        status = report.main()
        return status, capsys.readouterr().out

    return diagnose


@pytest.mark.parametrize(("facts", "text", "remedy"), BROKEN.values(), ids=BROKEN)
def test_it_says_what_is_wrong_and_what_mends_it(facts, text, remedy, diagnose):
    status, output = diagnose(facts, backends=False)
    lines = output.splitlines()
    (at,) = (number for number, line in enumerate(lines) if re.match(text, line))
    assert lines[at + 1].strip().startswith(remedy)
    assert [line for line in lines if line.startswith(("error:", "warning:"))] == [lines[at]], "one cause, one finding"
    assert status == (0 if text.startswith("warning") else 1)


@pytest.mark.parametrize(
    "facts",
    [
        GOOD,
        WITHOUT_GPU,
        dataclasses.replace(WITHOUT_GPU, libraries={"NVVM": Library(trouble="ImportError")}),
        dataclasses.replace(WITHOUT_GPU, driver=driver((11, 4), gpus=()), torch_cuda=(13, 0)),
        changed(driver=driver((13, 2))),
        changed(torch_cuda=(13, 2)),  # a driver serves the later minors of its major
        changed(torch_cuda=(12, 8), libraries=cuda12()),
        changed(caches=Caches(Path("/tmp"), False)),
        with_libraries(NVVM=Library((), "libNVVM 2.0")),
    ],
)
def test_nothing_is_wrong(facts, diagnose):
    status, output = diagnose(facts, backends=False)
    assert status == 0 and output.endswith("nothing is wrong\n")


def test_bounds_are_those_of_the_metadata():
    metadata = configparser.ConfigParser()
    metadata.read(ROOT / "setup.cfg")
    lines = metadata["options"]["install_requires"].splitlines()
    asked = [line for line in lines if line and not line.startswith("#")]
    assert sorted(asked) == sorted(map(findings.bounded, findings.BOUNDS))


def test_versions():
    assert probes.numbers("2.13.0+cu130") == (2, 13, 0) and probes.numbers("2.5.0rc1") == (2, 5, 0) and probes.numbers("") == ()


# Backends


def off(amount):
    """The CPU backend's ``run`` with results that are wrong by as much."""
    right = backend_cpu.run
    return lambda *args: right(*args) + amount


def test_kernels_are_compiled_and_not_found_on_disk(monkeypatch):
    places = [cache.place()]
    monkeypatch.setattr(report, "gather", lambda: WITHOUT_GPU)
    monkeypatch.setattr(report, "check_backends", lambda facts, remedy: places.append(cache.place()) or [])
    assert report.main() == 0
    assert places[0] != places[1] and not places[1].parent.exists() and cache.place() == places[0]


def test_a_wrong_kernel(diagnose, monkeypatch):
    monkeypatch.setattr(backend_cpu, "run", off(1e-3))
    status, output = diagnose(WITHOUT_GPU)
    assert status == 1
    assert re.search(r"^cpu +fp32 on cpu: forward off by 1\.0e-03, where 4\.\de-05 is allowed", output, re.MULTILINE)
    assert re.search(r"^error: cpu in fp32 on cpu: forward off by .*\n    report this output", output, re.MULTILINE)
    assert re.search(r"^reference .*forward ok .*backward ok", output, re.MULTILINE)


def test_a_wrong_gradient(diagnose, monkeypatch):
    right = backend_cpu.activate_backward
    monkeypatch.setattr(backend_cpu, "activate_backward", lambda *args: right(*args).mul_(1.001))
    status, output = diagnose(WITHOUT_GPU)
    assert status == 1 and re.search(r"^cpu +fp32 on cpu: forward ok .*, backward off by", output, re.MULTILINE)


def test_nan_is_wrong(diagnose, monkeypatch):
    monkeypatch.setattr(backend_cpu, "run", off(float("nan")))
    assert diagnose(WITHOUT_GPU)[0] == 1


@pytest.mark.parametrize("place", ["supports", "run"])
def test_a_backend_that_raises(place, diagnose, monkeypatch):
    def fail(*args):
        raise OSError("no such\n\nfile")

    monkeypatch.setattr(backend_cpu, place, fail)
    status, output = diagnose(WITHOUT_GPU)
    assert status == 1 and re.search(r"^error: cpu in fp32 on cpu: .*OSError: no such file$", output, re.MULTILINE)


def test_what_explains_a_failure_is_mended_first(diagnose, monkeypatch):
    monkeypatch.setattr(backend_cpu, "run", off(1.0))
    _, output = diagnose(dataclasses.replace(WITHOUT_GPU, packages=PACKAGES | {"numpy": "2.5.0"}))
    assert re.search(r"^error: cpu in fp32.*\n    first mend what is said above$", output, re.MULTILINE)


def test_ptx_that_is_too_new_is_known_by_its_message():
    for message in ("ptxas fatal : Unsupported .version 9.2; current version is '9.0'", "CUDA_ERROR_UNSUPPORTED_PTX_VERSION"):
        assert findings.failure_remedy(message, LIBRARIES) == "pip install 'nvidia-nvvm==13.0.*'"
    assert findings.failure_remedy("OSError", LIBRARIES) == findings.REPORT


# Probes


class FakeLibrary:
    """libcuda of a driver that serves CUDA 13.1, with one H200, or that does not start."""

    def __init__(self, status):
        self.status = status

    def __getattr__(self, name):
        return lambda *args: self.status if name == "cuInit" else 0

    def cuDriverGetVersion(self, version):
        version._obj.value = 13010

    def cuDeviceGetCount(self, count):
        count._obj.value = 1
        return 0

    def cuDeviceGetName(self, name, size, device):
        name.value = H200.name.encode()

    def cuDeviceTotalMem_v2(self, memory, device):
        memory._obj.value = H200.memory

    def cuDeviceGetAttribute(self, value, number, device):
        value._obj.value = {75: 9, 76: 0, 16: 132}[number]

    def cuGetErrorName(self, status, name):
        ctypes.cast(name, ctypes.POINTER(ctypes.c_char_p))[0] = b"CUDA_ERROR_UNKNOWN"

    def nvmlSystemGetDriverVersion(self, text, size):
        text.value = b"590.1"


@pytest.mark.parametrize(
    ("status", "gpus", "trouble"),
    [(0, (H200,), ""), (100, (), ""), (999, (), "CUDA_ERROR_UNKNOWN")],
    ids=["", "no device", "broken"],
)
def test_the_driver_is_asked(status, gpus, trouble, monkeypatch):
    monkeypatch.setattr(probes, "shared_library", lambda *names: FakeLibrary(status))
    assert probes.driver() == Driver("590.1", (13, 1), gpus, trouble)


def test_probes_that_raise_are_named(monkeypatch):
    def fail():
        raise AttributeError("torn")

    for name in ("driver", "packages", "libraries", "simulated", "caches", "torch_devices"):
        monkeypatch.setattr(probes, name, fail)
    facts = probes.gather()
    assert dict.fromkeys(("driver", "packages", "libraries", "simulated", "caches"), "AttributeError: torn") == facts.stopped
    assert facts.torch_trouble == "AttributeError: torn"


def test_without_the_bindings(monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    found = probes.libraries()
    assert list(found) == ["NVVM", "nvJitLink", "NVRTC"]
    assert all("cuda.bindings" in library.trouble and not library.version for library in found.values())


def test_a_home_that_cannot_be_written(tmp_path, monkeypatch):
    """Below a regular file, where not even root can write."""
    (tmp_path / "file").write_text("")
    nowhere, there = tmp_path / "file" / "home", tmp_path / "new" / "folder"
    for variable in ("NUMBA_CACHE_DIR", "XDG_CACHE_HOME", "CUDA_CACHE_PATH", "CUDA_CACHE_DISABLE"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HOME", str(nowhere))
    assert probes.caches() == Caches(None, None)
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(there))
    monkeypatch.setenv("CUDA_CACHE_PATH", str(there))
    assert probes.caches() == Caches(there / "numba_impl", there)
    assert [path.name for path in tmp_path.iterdir()] == ["file"], "something was left behind"
    monkeypatch.setenv("CUDA_CACHE_DISABLE", "1")
    assert probes.caches().cuda is False


def test_a_cache_that_others_can_write(tmp_path, monkeypatch):
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    (tmp_path / "numba_impl").mkdir(0o700)
    assert probes.caches().kernels == tmp_path / "numba_impl"
    (tmp_path / "numba_impl").chmod(0o777)
    assert probes.caches().kernels is None


def test_the_simulators_switch_is_found_where_numba_cannot_be_imported(monkeypatch):
    monkeypatch.setitem(sys.modules, "numba", None)
    for value, on in (("1", True), ("0", False), ("", False)):
        monkeypatch.setenv("NUMBA_ENABLE_CUDASIM", value)
        assert probes.simulated() is on
