"""``python -m numba_impl doctor``: what it says of this machine, and of installations and kernels that are broken."""

import configparser
import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numba
import pytest
import torch
from cuda.bindings import driver
from packaging.requirements import Requirement

from numba_impl import dispatch, doctor
from numba_impl.doctor import Failure
from tests.cases import IMPORTS

ROOT = Path(__file__).parent.parent
SECONDS = 300  # with a GPU it compiles every kernel

H200 = SimpleNamespace(name="NVIDIA H200", major=9, minor=0, total_memory=140 * 2**30, multi_processor_count=132)
PACKAGES = {"torch": "2.13.0+cu130", "numba": "0.68.1", "numba-cuda": "0.30.4", "numpy": "2.4.6"}
REQUIRED = ["torch>=2.9", "numba<0.69,>=0.68", "numba-cuda<0.31,>=0.30.4", "numpy<2.5"]
CU12 = "'torch<2.11,>=2.9' 'numba-cuda[cu12]<0.31,>=0.30.4' 'numpy<2.5'"
CU13 = "'torch>=2.11,>=2.9' 'numba-cuda[cu13]<0.31,>=0.30.4' 'numpy<2.5'"
REINSTALL = "pip install --force-reinstall"


def run(folder, *flags, **environment):
    command = [sys.executable, *flags, "-m", "numba_impl", "doctor"]
    everything = os.environ | IMPORTS | environment
    return subprocess.run(command, cwd=folder, env=everything, capture_output=True, text=True, timeout=SECONDS)


def raising(error):
    def fail(*args):
        raise error

    return fail


# The command


def test_the_command_without_a_gpu(tmp_path):
    done = run(tmp_path, "-W", "error", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0 and not done.stderr, done.stdout + done.stderr
    assert re.search(r"^driver .*the CPU alone is checked$", done.stdout, re.MULTILINE)
    for precision in ("fp32", "tf32"):
        right = rf"^cpu +{precision} on cpu: forward ok \(\d+\.\d s\), backward ok \(\d+\.\d s\)$"
        assert re.search(right, done.stdout, re.MULTILINE)
    assert re.search(r"^tiled .*: declined, x is on cpu, not on a CUDA device$", done.stdout, re.MULTILINE)
    assert "Traceback" not in done.stdout and done.stdout.endswith("nothing is wrong\n")


@pytest.mark.gpu
def test_the_command_on_a_gpu(tmp_path):
    done = run(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    backends = ["tiled", "composite", "reference"] + ["hopper"] * (torch.cuda.get_device_capability() == (9, 0))
    for name in backends:
        assert re.search(rf"^{name} +fp32.* on cuda:0: forward ok \(.* s\), backward ok", done.stdout, re.MULTILINE), done.stdout
    assert re.search(r"^driver +\d+\..*, serves CUDA \d+\.\d$", done.stdout, re.MULTILINE)
    assert re.search(r"^GPU 0 .*compute capability \d+\.\d, \d+ GiB, \d+ multiprocessors$", done.stdout, re.MULTILINE)


def test_a_broken_installation_gives_lines_and_no_traceback(tmp_path):
    """Numba's import fails as with a NumPy that is too new, that of the CUDA bindings as without them."""
    for package, line in {"numba": "raise AttributeError('no row_stack')", "cuda": "raise ImportError('no cuda')"}.items():
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text(line)
    done = run(tmp_path, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 1 and not done.stderr, done.stdout + done.stderr
    assert f"error: numba cannot be imported: AttributeError: no row_stack\n    {REINSTALL} 'numba" in done.stdout
    cpu = r"^error: cpu in fp32 on cpu: forward AttributeError: no row_stack.*\n    first mend what is said above$"
    assert re.search(cpu, done.stdout, re.MULTILINE)
    assert re.search(r"^NVVM +cannot be loaded, and only a GPU needs it$", done.stdout, re.MULTILINE)


# What does not fit together


@pytest.fixture
def found(monkeypatch, tmp_path):
    """Gives a function that changes what the doctor finds: at first, a machine with an H200 on which nothing is wrong."""
    facts = dict(driver=((13, 0), 1, ""), gpus=[H200], built="13.0", packages={}, kept=tmp_path)
    facts |= dict(NVVM=(13, 0, 88), nvJitLink=(13, 0), NVRTC=(13, 0), simulated=False, numba=numba)

    def give(name):
        def give():
            if isinstance(facts[name], Exception):
                raise facts[name]
            return facts[name]

        return give

    def change(**changes):
        facts.update(changes)
        monkeypatch.setattr(torch.version, "cuda", facts["built"])
        monkeypatch.setattr(numba.config, "ENABLE_CUDASIM", facts["simulated"])

    def libraries():
        return {name: facts[name] for name in ("NVVM", "nvJitLink", "NVRTC")}

    for name in ("driver", "gpus", "kept"):
        monkeypatch.setattr(doctor, name, give(name))
    monkeypatch.setattr(doctor, "libraries", libraries)
    monkeypatch.setattr(doctor, "installed", lambda name: (PACKAGES | facts["packages"]).get(name))
    monkeypatch.setattr(doctor, "required", lambda: {each.name: each.specifier for each in map(Requirement, REQUIRED)})
    monkeypatch.setattr(doctor, "importlib", SimpleNamespace(import_module=lambda name: give("numba")()))
    change()
    return change


CUDA12 = dict.fromkeys(("NVVM", "nvJitLink", "NVRTC"), (12, 9))
T4 = SimpleNamespace(**vars(H200) | dict(name="T4", major=7, minor=5))
WITHOUT_GPU = dict(driver=((), 0, ""), gpus=[], built=None)

BROKEN = {
    "numpy": (dict(packages={"numpy": "2.5.0"}), "error: numpy 2.5.0 does not fit", "pip install 'numpy<2.5'"),
    "numba": (dict(packages={"numba": "0.67.2"}), "error: numba 0.67.2 does not fit", "pip install 'numba<0.69,>=0.68'"),
    "no numba-cuda": (
        dict(packages={"numba-cuda": None}),
        "error: numba-cuda is not installed",
        "pip install 'numba-cuda<0.31,>=0.30.4'",
    ),
    "torch": (dict(packages={"torch": "2.8.1"}), "error: torch 2.8.1", "pip install 'torch>=2.9'"),
    "simulator": (dict(simulated=True), "error: .*simulator is on", "unset NUMBA_ENABLE_CUDASIM"),
    "libraries of CUDA 12": (
        CUDA12,
        r"error: torch is built for CUDA 13\.0.*NVVM 12\.9, nvJitLink 12\.9, NVRTC 12\.9",
        "pip install 'torch>=2.9' 'numba-cuda[cu13]<0.31,>=0.30.4'",
    ),
    "torch of CUDA 12": (
        dict(built="12.8"),
        r"error: torch is built for CUDA 12\.8.*NVVM 13\.0",
        "pip install 'torch>=2.9' 'numba-cuda[cu12]<0.31,>=0.30.4'",
    ),
    "old driver": (
        dict(driver=((12, 8), 1, ""), gpus=RuntimeError("old")),
        r"error: the driver serves CUDA 12\.8, too old",
        f"pip install {CU12}",
    ),
    "older driver": (
        dict(driver=((11, 4), 1, "")),
        r"error: the driver serves CUDA 11\.4",
        "update the NVIDIA driver to one that",
    ),
    "stub": (
        dict(driver=((13, 0), 0, "CUDA_ERROR_STUB_LIBRARY"), gpus=[]),
        "error: the driver does not start: CUDA_ERROR_STUB_LIBRARY",
        "take the folder 'stubs'",
    ),
    "a driver that cannot be asked": (
        dict(driver=OSError("torn"), gpus=[]),
        "error: the driver does not start: OSError: torn",
        "restart the machine",
    ),
    "no NVVM": (
        dict(NVVM=Failure("ImportError: libnvvm.so not found")),
        "error: NVVM cannot be loaded: ImportError: libnvvm.so not found",
        "pip install 'torch>=2.9' 'numba-cuda[cu13]<0.31,>=0.30.4'",
    ),
    "NVVM newer than nvJitLink": (
        dict(NVVM=(13, 2, 1)),
        r"error: NVVM 13\.2\.1 writes PTX that is too new for nvJitLink 13\.0",
        "pip install 'nvidia-nvvm==13.0.*'",
    ),
    "torch without CUDA": (dict(built=None, gpus=[]), "error: torch is built without CUDA", f"{REINSTALL} {CU13}"),
    "torch sees no GPU": (
        dict(gpus=RuntimeError("broken")),
        "error: torch cannot use the GPU: RuntimeError: broken",
        f"{REINSTALL} {CU13}",
    ),
    "no Numba": (
        dict(numba=AttributeError("row_stack")),
        "error: numba cannot be imported: AttributeError: row_stack",
        f"{REINSTALL} 'numba<0.69,>=0.68' 'numba-cuda<0.31,>=0.30.4' 'numpy<2.5'",
    ),
    "old GPU": (
        dict(gpus=[T4]),
        r"warning: GPU 0, T4, compute capability 7\.5, is below 8\.0",
        "use a GPU of compute capability 8.0 or more",
    ),
    "no cache": (
        dict(kept=OSError("others can write it")),
        "warning: compiled kernels are not kept: OSError: others can write it",
        "set NUMBA_CACHE_DIR",
    ),
}


@pytest.fixture
def diagnose(monkeypatch, capsys):
    """Gives (exit status, output) of the command, which checks no backend."""
    monkeypatch.setattr(doctor, "check_backends", lambda remedy: [])
    return lambda: (doctor.main(), capsys.readouterr().out)


@pytest.mark.parametrize(("changes", "text", "remedy"), BROKEN.values(), ids=BROKEN)
def test_it_says_what_is_wrong_and_what_mends_it(changes, text, remedy, found, diagnose):
    found(**changes)
    status, output = diagnose()
    lines = output.splitlines()
    (at,) = (number for number, line in enumerate(lines) if re.match(text, line))
    assert lines[at + 1].strip().startswith(remedy)
    assert [line for line in lines if line.startswith(("error:", "warning:"))] == [lines[at]], "one cause, one finding"
    assert status == (0 if text.startswith("warning") else 1)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        WITHOUT_GPU,
        WITHOUT_GPU | dict(NVVM=Failure("ImportError")),
        WITHOUT_GPU | dict(driver=((11, 4), 0, ""), built="13.0"),
        dict(driver=((13, 2), 1, "")),
        dict(built="13.2"),  # a driver serves the later minors of its major
        CUDA12 | dict(built="12.8"),
        dict(NVVM=()),  # of an unknown CUDA version
    ],
)
def test_nothing_is_wrong(changes, found, diagnose):
    found(**changes)
    status, output = diagnose()
    assert status == 0 and output.endswith("nothing is wrong\n")


def test_what_is_asked_for_is_read_from_the_metadata():
    """Of a package that is installed; ``setup.cfg`` may have changed since."""
    if not doctor.installed("numba-impl"):
        pytest.skip("the package is not installed")
    metadata = configparser.ConfigParser()
    metadata.read(ROOT / "setup.cfg")
    lines = [line for line in metadata["options"]["install_requires"].splitlines() if line and not line.startswith("#")]
    assert doctor.required() == {each.name: each.specifier for each in map(Requirement, lines)}


def test_versions():
    assert doctor.numbers("2.13.0+cu130") == (2, 13, 0) and doctor.numbers("2.5.0rc1") == (2, 5, 0) and doctor.numbers("") == ()


# What is there

RESULT = driver.CUresult


@pytest.mark.parametrize(
    ("status", "gpus", "trouble"),
    [
        (RESULT.CUDA_SUCCESS, 2, ""),
        (RESULT.CUDA_ERROR_NO_DEVICE, 0, ""),
        (RESULT.CUDA_ERROR_UNKNOWN, 0, "CUDA_ERROR_UNKNOWN"),
    ],
)
def test_the_driver_is_asked(status, gpus, trouble, monkeypatch):
    monkeypatch.setattr(driver, "cuDriverGetVersion", lambda: (RESULT.CUDA_SUCCESS, 13010))
    monkeypatch.setattr(driver, "cuInit", lambda flags: (status,))
    monkeypatch.setattr(driver, "cuDeviceGetCount", lambda: (RESULT.CUDA_SUCCESS, 2))
    assert doctor.driver() == ((13, 1), gpus, trouble)


def test_without_a_driver_or_the_bindings(monkeypatch):
    monkeypatch.setattr(driver, "cuDriverGetVersion", raising(RuntimeError("no libcuda.so.1")))
    assert doctor.driver() == ((), 0, "")
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    assert doctor.driver() == ((), 0, "")
    for name in ("nvvm", "nvjitlink", "nvrtc"):
        monkeypatch.delitem(sys.modules, f"cuda.bindings.{name}", raising=False)
    assert list(doctor.libraries()) == ["NVVM", "nvJitLink", "NVRTC"]
    assert all("cuda.bindings" in library.why for library in doctor.libraries().values())


def test_where_kernels_are_kept(tmp_path, monkeypatch):
    """A directory that is missing is made; nothing is written below a regular file, not even by root."""
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "new" / "folder"))
    place = doctor.kept()
    assert place == tmp_path / "new" / "folder" / "numba_impl" and not list(place.iterdir()), "something was left behind"
    place.chmod(0o777)
    assert "others own" in doctor.attempt(doctor.kept).why
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "file" / "nowhere"))
    assert "NotADirectoryError" in doctor.attempt(doctor.kept).why


# Backends


@pytest.fixture
def without_gpu(found, capsys):
    """Gives (exit status, output) of the command on a machine without a GPU."""
    found(**WITHOUT_GPU)
    return lambda: (doctor.main(), capsys.readouterr().out)


def broken(monkeypatch, **changes):
    monkeypatch.setitem(dispatch.BACKENDS, "cpu", dataclasses.replace(dispatch.BACKENDS["cpu"], **changes))
    dispatch.forget()


def spoiled(monkeypatch, operation, spoil):
    """Spoil what the CPU backend gives for an operation."""
    right = dispatch.BACKENDS["cpu"].plan

    def plan(problem):
        made = right(problem)
        wrong = dataclasses.replace(made, run=lambda *args: spoil(made.run(*args)))
        return wrong if problem.operation == operation else made

    broken(monkeypatch, plan=plan)


def test_kernels_are_compiled_and_not_found_on_disk(monkeypatch, tmp_path):
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    places = []
    monkeypatch.setattr(doctor, "check_backends", lambda remedy: places.append(Path(os.environ["NUMBA_CACHE_DIR"])) or [])
    doctor.main()
    assert places[0] != tmp_path and not places[0].exists() and os.environ["NUMBA_CACHE_DIR"] == str(tmp_path)


def test_a_wrong_kernel(without_gpu, monkeypatch):
    spoiled(monkeypatch, "forward", lambda y: y + 1e-3)
    status, output = without_gpu()
    assert status == 1
    assert re.search(r"^cpu +fp32 on cpu: forward Wrong: \d+ of \d+ values wrong; .*want.*within", output, re.MULTILINE)
    assert re.search(r"^error: cpu in fp32 on cpu: forward Wrong: .*\n    report this output", output, re.MULTILINE)
    assert re.search(r"^reference .*forward ok .*backward ok", output, re.MULTILINE)


def test_a_wrong_gradient(without_gpu, monkeypatch):
    spoiled(monkeypatch, "pre_gradient", lambda g: g * 1.001)
    status, output = without_gpu()
    assert status == 1 and re.search(r"^cpu +fp32 on cpu: forward ok .*, backward Wrong: ", output, re.MULTILINE)


def test_nan_is_wrong(without_gpu, monkeypatch):
    spoiled(monkeypatch, "forward", lambda y: y + float("nan"))
    assert without_gpu()[0] == 1


@pytest.mark.parametrize("place", ["why_not", "plan"])
def test_a_backend_that_raises(place, without_gpu, monkeypatch):
    broken(monkeypatch, **{place: raising(OSError("no such\n\nfile"))})
    status, output = without_gpu()
    assert status == 1 and re.search(r"^error: cpu in fp32 on cpu: .*OSError: no such file$", output, re.MULTILINE)


def test_what_explains_a_failure_is_mended_first(found, without_gpu, monkeypatch):
    spoiled(monkeypatch, "forward", lambda y: y + 1)
    found(packages={"numpy": "2.5.0"})
    assert re.search(r"^error: cpu in fp32.*\n    first mend what is said above$", without_gpu()[1], re.MULTILINE)


def test_ptx_that_is_too_new_is_known_by_its_message(found):
    for message in ("ptxas fatal : Unsupported .version 9.2; current version is '9.0'", "CUDA_ERROR_UNSUPPORTED_PTX_VERSION"):
        assert doctor.own_remedy(message) == "pip install 'nvidia-nvvm==13.0.*'"
    assert doctor.own_remedy("OSError") == doctor.REPORT
