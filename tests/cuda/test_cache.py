"""Kernels kept on disk: what their names depend on, what can happen to their files, and what first calls cost."""

import errno
import importlib.metadata
import importlib.util
import itertools
import json
import os
import pwd
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from cuda import pathfinder
from cuda.bindings import driver
from numba.cuda import types

from numba_impl import dispatch, gpu
from numba_impl.arguments import PRECISIONS
from numba_impl.backends.base import LAYER
from numba_impl.backends.composite import channel_sum, elementwise
from numba_impl.backends.hopper import kernel as hopper
from numba_impl.backends.hopper.layout import Config
from numba_impl.backends.tiled import kernel as tiled
from numba_impl.cuda import cache, kernel
from numba_impl.epilogue import MISH_ADD_HARDTANH_SCALE
from numba_impl.problem import Operand, Problem
from tests.cases import BENCHMARK, GPUS, IMPORTS, Case, problem

PACKAGE = Path(cache.__file__).parents[1]
CODE = bytes(range(256)) * 256
KEEPS_NONE = "numba_impl keeps no compiled kernels"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The cache's directory, not made yet; no compiler and no driver is asked for its version."""
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(cache, "_toolchain", lambda: "toolchain")
    return tmp_path / "numba_impl"


@pytest.fixture(autouse=True)
def notes(caplog):
    """Gives the notes so far."""
    cache._note.cache_clear()
    return lambda: [record.message for record in caplog.records if record.levelname == "WARNING"]


def compiled(identity="kernel", code=CODE) -> bool:
    """Whether a kernel is compiled rather than found on disk; either way its code is right."""
    calls = []
    assert cache.fetch("name", identity, lambda: calls.append(1) or code, bytes) == code
    return bool(calls)


def only_file(folder) -> Path:
    (file,) = folder.iterdir()
    return file


# What is kept


def test_a_kernel_is_compiled_once(folder, caplog):
    caplog.set_level("INFO", "numba_impl")
    assert compiled() and not compiled()
    assert [record.args[:2] for record in caplog.records] == [("name", "compiled"), ("name", "from the cache")]
    assert compiled("other", b"other code") and not compiled("other", b"other code")
    assert not compiled() and len(list(folder.iterdir())) == 2


def test_one_that_is_not_to_be_kept(folder):
    assert compiled(None) and compiled(None) and not folder.exists()


def test_with_the_users_rights_alone(folder):
    before = os.umask(0)
    try:
        assert compiled()
    finally:
        os.umask(before)
    assert folder.stat().st_mode & 0o777 == 0o700 and only_file(folder).stat().st_mode & 0o777 == 0o600


def test_the_oldest_go_first(folder, monkeypatch):
    assert compiled(1) and compiled(2)
    (folder / "left by a killed process").write_bytes(CODE)
    monkeypatch.setattr(cache, "LIMIT", 2 * cache._path(1).stat().st_size)
    for age, file in enumerate((cache._path(2), cache._path(1), folder / "left by a killed process")):
        os.utime(file, (-age, -age))
    assert compiled(3), "written last"
    assert not compiled(3) and not compiled(2), "what fits was removed"
    assert sorted(folder.iterdir()) == sorted((cache._path(2), cache._path(3)))


def test_where_it_is(tmp_path, monkeypatch):
    names = ("NUMBA_CACHE_DIR", "XDG_CACHE_HOME", "HOME")
    for name in names:
        monkeypatch.setenv(name, str(tmp_path / name))
    for name, below in zip(names, ("numba_impl", "numba_impl", ".cache/numba_impl")):
        assert cache.folder() == tmp_path / name / below and cache.folder().is_dir()
        monkeypatch.setenv(name, "")


# What its name depends on


@pytest.fixture
def copied(tmp_path, monkeypatch):
    """Gives the cache of a copy of the package, imported anew, and the folder of its sources."""
    sources = tmp_path / "copy"
    shutil.copytree(PACKAGE, sources, ignore=shutil.ignore_patterns("__pycache__"))

    def imported():
        module = module_at(sources / "cuda" / "cache.py")
        monkeypatch.setattr(module, "_toolchain", lambda: "toolchain")
        return module

    return imported, sources


def module_at(path):
    spec = importlib.util.spec_from_file_location("another_cache", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_source_counts(copied, folder):
    imported, sources = copied
    assert imported()._path("kernel") == cache._path("kernel")
    names = {cache._path("kernel").name}
    files = sorted(sources.rglob("*.py"))
    assert sources / "epilogue.py" in files
    for file in files:
        file.write_text(file.read_text() + "#")
        names.add(imported()._path("kernel").name)
    (sources / "new.py").write_text("")
    names.add(imported()._path("kernel").name)
    (sources / "new.py").rename(sources / "new_.py")
    names.add(imported()._path("kernel").name)
    assert len(names) == len(files) + 3


def test_sources_edited_after_their_import(copied, folder, notes):
    """The process computes by what it has imported, so nothing of it is right for what is there now."""
    imported, sources = copied
    old, source = imported(), sources / "epilogue.py"
    source.write_text(source.read_text() + "#")
    assert old._path("kernel") is None and imported()._path("kernel") is not None
    assert notes() == [f"{KEEPS_NONE}: the package's sources are not those that this process has imported"]


def test_without_sources(copied, folder, notes):
    imported, sources = copied
    module = imported()
    for source in sources.rglob("*.py"):
        source.unlink()
    module.IMPORTED = module._sources()
    assert module._path("kernel") is None and len(notes()) == 1


TOOLCHAIN = {
    "nvvm": lambda patch, files: (files / "nvvm").write_text("another release"),
    "nvJitLink": lambda patch, files: (files / "nvJitLink").write_text("another release"),
    "driver": lambda patch, files: (files / "driver").write_text("another release"),
    "CUDA of the driver": lambda patch, files: patch.setattr(driver, "cuDriverGetVersion", lambda: (0, 13010)),
    "Python": lambda patch, files: patch.setattr(sys, "version", "3.99"),
    "Numba's settings": lambda patch, files: patch.setenv("NUMBA_OPT", "1"),
}


@pytest.mark.parametrize("package", ["numba", "numba-cuda", "llvmlite", "cuda-core", "cuda-bindings"])
def test_every_package_that_compiles_counts(package, monkeypatch):
    monkeypatch.setattr(pathfinder, "load_nvidia_dynamic_lib", lambda name: SimpleNamespace(abs_path=os.devnull))
    monkeypatch.setattr(driver, "cuDriverGetVersion", lambda: (0, 13000))
    before, right = cache._toolchain.__wrapped__(), importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0" if name == package else right(name))
    assert cache._toolchain.__wrapped__() != before


@pytest.mark.parametrize("change", TOOLCHAIN.values(), ids=TOOLCHAIN)
def test_what_compiles_counts(change, tmp_path, monkeypatch):
    monkeypatch.setattr(cache, "_toolchain", cache._toolchain.__wrapped__)
    for library in ("nvvm", "nvJitLink", "driver"):
        (tmp_path / library).write_text("a release")
    monkeypatch.setattr(pathfinder, "load_nvidia_dynamic_lib", lambda name: SimpleNamespace(abs_path=str(tmp_path / name)))
    monkeypatch.setattr(driver, "cuDriverGetVersion", lambda: (0, 13000))
    monkeypatch.setattr(cache, "DRIVER", tmp_path / "driver")
    before = cache._path("kernel").name
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))  # it only says where
    assert cache._path("kernel").name == before
    change(monkeypatch, tmp_path)
    assert cache._path("kernel").name != before


# What can happen to it

DAMAGES = {
    "a bit": lambda file, data: file.write_bytes(data[:-1] + bytes([data[-1] ^ 1])),
    "a bit of the digest": lambda file, data: file.write_bytes(bytes([data[0] ^ 1]) + data[1:]),
    "cut short": lambda file, data: file.write_bytes(data[: len(data) // 2]),
    "empty": lambda file, data: file.write_bytes(b""),
    "another kernel's": lambda file, data: shutil.move(cache._path("other"), file),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_file(damage, folder):
    assert compiled() and compiled("other", b"other code")
    file = cache._path("kernel")
    damage(file, file.read_bytes())
    assert compiled() and not compiled()


def test_code_that_does_not_load(folder):
    """The driver refuses what it does not know, whoever wrote it. New code is kept only if it loads."""

    def load(code):
        if code == b"old":
            raise RuntimeError("CUDA_ERROR_NO_BINARY_FOR_GPU")
        return code

    with pytest.raises(RuntimeError, match="NO_BINARY"):
        cache.fetch("name", "kernel", lambda: b"old", load)
    assert not list(folder.iterdir())
    assert cache.fetch("name", "kernel", lambda: b"old", bytes) == b"old"
    assert cache.fetch("name", "kernel", lambda: b"new", load) == b"new"
    assert not compiled(code=b"new")


# Imports the cache alone, without torch, which takes a second.
PROCESS = f"""
import importlib.util, os, signal, sys, time
spec = importlib.util.spec_from_file_location("cache", {cache.__file__!r})
cache = importlib.util.module_from_spec(spec)
spec.loader.exec_module(cache)
assert not {{"torch", "numba", "cuda"}} & set(sys.modules)
cache._toolchain = lambda: "toolchain"
code = bytes(range(256)) * 256
"""


def start(script):
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    return subprocess.Popen([sys.executable, "-W", "error", "-c", PROCESS + script], text=True, **pipes)


def test_sixteen_processes_at_once(folder):
    script = """
def compile():
    time.sleep(0.02)
    print("compiled")
    return code

print("ready", flush=True)
sys.stdin.readline()
for _ in range(5):
    assert cache.fetch("name", "kernel", compile, bytes) == code
"""
    processes = [start(script) for _ in range(16)]
    assert all(process.stdout.readline() == "ready\n" for process in processes)
    for process in processes:
        process.stdin.write("\n")
        process.stdin.flush()
    outputs = [process.communicate() for process in processes]
    assert all(process.returncode == 0 for process in processes) and not any(errors for _, errors in outputs), outputs
    assert {out for out, _ in outputs} <= {"compiled\n", ""}, "a process compiled twice"
    assert only_file(folder) == cache._path("kernel") and not compiled()


@pytest.mark.parametrize("killed_by", ["cache.os.replace", "cache._digest"])
def test_a_process_killed_as_it_writes(killed_by, folder):
    script = f"""
{killed_by} = lambda *args: os.kill(os.getpid(), signal.SIGKILL)
cache.fetch("name", "kernel", lambda: code, bytes)
"""
    process = start(script)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert only_file(folder) != cache._path("kernel")
    assert compiled() and not compiled()


def full_disk(**options):
    """A temporary file that takes nothing, as on a device that is full."""
    handle, name = MKSTEMP(**options)
    os.close(handle)
    return os.open("/dev/full", os.O_WRONLY), name


def read_only(**options):
    raise OSError(errno.EROFS, os.strerror(errno.EROFS), "a random name")


MKSTEMP = tempfile.mkstemp


@pytest.mark.parametrize(("mkstemp", "number"), [(full_disk, errno.ENOSPC), (read_only, errno.EROFS)])
def test_a_directory_that_takes_no_more(mkstemp, number, folder, notes, monkeypatch):
    """What is there is still read."""
    assert compiled()
    monkeypatch.setattr(tempfile, "mkstemp", mkstemp)
    assert all(compiled(identity) for identity in (1, 2, 1))
    assert not compiled() and only_file(folder) == cache._path("kernel")
    assert notes() == [f"{KEEPS_NONE} in {folder}: {os.strerror(number)}"]


@pytest.mark.parametrize("place", ["/proc", "/dev/null", "below a file", "no home"])
def test_no_directory_can_be_made(place, folder, notes, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("NUMBA_CACHE_DIR", place if place.startswith("/") else str(tmp_path / "file" / "nowhere"))
    if place == "no home":
        for name in ("NUMBA_CACHE_DIR", "XDG_CACHE_HOME", "HOME"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr(pwd, "getpwuid", lambda uid: {}[uid])
    assert compiled() and compiled()
    assert len(notes()) == 1 and notes()[0].startswith(KEEPS_NONE)


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o1777, None], ids=["group", "others", "sticky", "another's"])
def test_a_directory_of_others(mode, folder, notes, monkeypatch):
    """Others can write it, or another user owns it."""
    assert compiled()
    if mode:
        folder.chmod(mode)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert compiled() and compiled("other")
    assert len(list(folder.iterdir())) == 1
    assert notes() == [f"{KEEPS_NONE}: others own {folder} or can write it"]


@pytest.mark.parametrize("mode", [0o660, 0o606, None], ids=["group", "others", "another's"])
def test_a_file_of_others(mode, folder, notes, monkeypatch):
    """It is not read, and gives way to one of the user's own."""
    assert compiled()
    if mode:
        only_file(folder).chmod(mode)
    else:
        fstat = os.fstat
        monkeypatch.setattr(os, "fstat", lambda handle: owned_by_another(fstat(handle)))
    assert compiled()
    monkeypatch.undo()
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(folder.parent))
    monkeypatch.setattr(cache, "_toolchain", lambda: "toolchain")
    assert not compiled() and only_file(folder).stat().st_mode & 0o777 == 0o600
    assert notes() == [f"numba_impl does not read a compiled kernel: others own a file in {folder} or can write it"]


def owned_by_another(status):
    mode, inode, device, links, user, *others = status
    return os.stat_result((mode, inode, device, links, user + 1, *others))


# Kernels

LAYERS = {
    "composite": [Case((2, 5, 7, 22), 6, 3, 2, 1, 1)],
    "tiled": [Case((2, 5, 7, 22), 6, 3, 2, 1, 1), Case((2, 5, 7, 22), 6, 3, 2, 1), Case((64, 64, 32, 32), 64, 2, 2)],
    "hopper": [Case((2, 64, 3, 68), 64, 3, 2, 1, 1), Case((2, 32, 3, 68), 64, 3, 2, 1, 1), Case((2, 64, 3, 67), 32, 3, 2, 1)],
}


@pytest.fixture
def planned(monkeypatch):
    """Gives the kernels that plans of every backend prepare for an H200."""
    found, device = {}, torch.device("cuda", 0)
    monkeypatch.setattr(gpu, "of", lambda device: GPUS[9, 0])
    monkeypatch.setattr(gpu, "missing_libraries", lambda: "")
    monkeypatch.setattr(kernel.Kernel, "prepare", lambda self, *args: found.setdefault(id(self), self))
    layers = [(name, case) for name, cases in LAYERS.items() for case in cases]
    for (name, case), operation, permitted in itertools.product(layers, LAYER, PRECISIONS):
        dispatch.plan(problem(case, device, operation, permitted=permitted), name)
    for operation, terms in itertools.product(LAYER, (1, 3)):  # the alignment of tensors decides which of these a call takes
        built = hopper.build(Config(24, 8, terms, 4, True, operation), MISH_ADD_HARDTANH_SCALE)
        found[id(built)] = built
    dispatch.plan(Problem("channel_sum", Operand(torch.Size((2, 5, 7, 22)), torch.float32, "nchw"), device), "composite")
    return list(found.values())


def test_every_kernel_counts_and_every_capability(planned, monkeypatch):
    identities = []
    for capability in ((9, 0), (10, 0)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index, capability=capability: capability)
        identities += [repr(each._identity(0)) for each in planned]
    assert len(identities) == len(set(identities)) and "None" not in identities
    assert not re.search("0x[0-9a-f]{6}", "".join(identities)), "an address tells nothing to another process"
    assert {module.__name__ for module in (elementwise, channel_sum, tiled, hopper)} <= {k.function.__module__ for k in planned}
    assert len(planned) >= 14


@pytest.mark.parametrize(
    "changes",
    [
        {"function": channel_sum.build},
        {"function": elementwise.prepare},
        {"signature": types.void(types.int64)},
        {"threads": 64},
        {"blocks": 2},
        {"config": 2},
    ],
)
def test_all_that_a_kernel_is_compiled_for_counts(changes, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    arguments = dict(function=elementwise.build, signature=types.void(types.int32), threads=32, blocks=1, config=1)
    ours, others = (kernel.Kernel(**kind)._identity(0) for kind in (arguments, arguments | changes))
    assert repr(ours) != repr(others)


def test_a_kernel_finds_its_code(folder, compiler, monkeypatch):
    """All but what the driver does: the name in front of the cubin is that of the kernel in it."""
    from numba.cuda.codegen import CUDACodeLibrary
    from numba.cuda.dispatcher import _Kernel

    monkeypatch.setattr(CUDACodeLibrary, "_ensure_cc", lambda self, cc: cc or (9, 0, "a"))
    monkeypatch.setattr(_Kernel, "bind", lambda self: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(kernel, "_load_code", lambda index, code: code)
    made = channel_sum.build.__wrapped__
    name, _, cubin = made(torch.float32).on(0).partition(b"\0")
    assert name.startswith(b"_Z") and b"channel_sum" in name and cubin.startswith(b"\x7fELF") and b"\0.text." + name in cubin
    monkeypatch.setattr(kernel.Kernel, "_compile", lambda self: pytest.fail("compiled again"))
    assert made(torch.float32).on(0) == name + b"\0" + cubin


@pytest.mark.parametrize("status", [driver.CUresult.CUDA_SUCCESS, driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY])
def test_it_is_loaded_at_once(status, monkeypatch):
    """By the name in front of its cubin; what keeps it from a device is an error now, and not at its launch."""
    kernels = {(b"ELF\0", "name"): SimpleNamespace(handle=1)}

    class ObjectCode:
        def from_cubin(cubin):
            return SimpleNamespace(get_kernel=lambda name: kernels[cubin, name])

    monkeypatch.setattr(kernel, "ObjectCode", ObjectCode)
    monkeypatch.setattr(driver, "cuKernelGetAttribute", lambda attribute, kernel, device: (status, 32))
    if status == driver.CUresult.CUDA_SUCCESS:
        assert kernel._load_code(0, b"name\0ELF\0") in kernels.values()
    else:
        with pytest.raises(RuntimeError, match="CUDA_ERROR_OUT_OF_MEMORY"):
            kernel._load_code(0, b"name\0ELF\0")


def run(script, *arguments, folder):
    """What a new process prints that runs the script, with a cache of its own, and warnings as errors."""
    command = [sys.executable, "-W", "error", "-c", script, *map(str, arguments)]
    environment = os.environ | IMPORTS | {"NUMBA_CACHE_DIR": str(folder)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


TRAIN = """
import sys, torch
from numba.cuda.dispatcher import CUDADispatcher
from numba_impl import conv_transpose2d_mish_add_hardtanh_scale

def refuse(*args):
    raise AssertionError("a kernel is compiled")

mode, backend, path = sys.argv[1:]
if mode == "again":
    CUDADispatcher.compile = refuse
torch.manual_seed(0)
torch.backends.cudnn.deterministic = True
x, weight, bias = (torch.randn(shape, device="cuda") for shape in ((2, 16, 9, 70), (16, 24, 3, 3), (24,)))
bias.requires_grad_()
options = dict(add_value=0.5, scale=2, precision="fp32", backend=backend)
y = conv_transpose2d_mish_add_hardtanh_scale(x, weight, bias, 2, 1, 1, **options)
y.sum().backward()
results = y.detach().cpu(), bias.grad.cpu()
if mode == "first":
    torch.save(results, path)
else:
    assert all(map(torch.equal, results, torch.load(path))), "other bits"
"""


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["hopper", "tiled", "composite"])
def test_another_process_compiles_nothing_and_gives_the_same_bits(backend, tmp_path, request):
    if backend == "hopper":
        request.getfixturevalue("hopper")
    for mode in ("first", "again"):
        run(TRAIN, mode, backend, tmp_path / "results", folder=tmp_path)


@pytest.mark.gpu
def test_a_cubin_that_the_driver_refuses(tmp_path, monkeypatch):
    """Whole, and under its name, but no code."""
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    x, y = torch.zeros(5, device="cuda"), torch.full((5,), float("nan"), device="cuda")
    activate = elementwise.build.__wrapped__("activate", MISH_ADD_HARDTANH_SCALE, torch.float32)
    path = cache._path(activate._identity(x.device.index))
    cache._keep(path, b"name\0\x7fELF")
    activate.prepare(x.device, 1, 5)((x, y), (0, 0), (0.5, 2.0, -1.0, 1.0))
    assert y.tolist() == [1.0] * 5
    assert path.stat().st_size > 1000 and [path] == list(path.parent.iterdir())


# What first calls cost

IMPORT = """
import time, torch

def libraries():
    with open("/proc/self/maps") as maps:
        return {line.split()[-1] for line in maps if any(name in line for name in ("cuda", "nvvm", "nvJitLink", "nvrtc"))}

before, start = libraries(), time.perf_counter()
import model_numba
print(time.perf_counter() - start)
assert libraries() == before, libraries() - before
"""


def test_an_import_takes_little_and_loads_no_cuda_library(tmp_path):
    assert float(run(IMPORT, folder=tmp_path)) < 0.5


FIRST_CALL = """
import json, logging, sys, time, torch

start = time.perf_counter()
from model_numba import ModelNumba

imported = time.perf_counter()
compilations = []
handler, logger = logging.Handler(), logging.getLogger("numba_impl")
handler.emit = lambda record: compilations.append(record.args[2]) if record.args[1] == "compiled" else None
logger.addHandler(handler)
logger.setLevel(logging.INFO)
precision, *shape = json.loads(sys.argv[1])
model = ModelNumba(shape[1], 64, 3, 2, 1, 1, 0.5, 2, precision=precision).cuda()
x = torch.rand(shape, device="cuda")
with torch.no_grad():
    model(x)
torch.cuda.synchronize()
print(json.dumps([imported - start, time.perf_counter() - imported, sum(compilations)]))
"""


@pytest.mark.gpu
@pytest.mark.skipif("PYTEST_XDIST_WORKER" in os.environ, reason="other tests at the same time would take its time")
@pytest.mark.parametrize("precision", [None, "fp32"])
def test_first_calls_of_a_process(precision, tmp_path):
    """Seconds, less those of ``import torch``; the GPU's context and x are among them.

    The better of two processes each: the first on a machine reads Numba and the compilers from a disk.
    """
    arguments, folders = json.dumps([precision, *BENCHMARK.x]), [tmp_path / name for name in ("one", "another")]
    colds, warms = ([json.loads(run(FIRST_CALL, arguments, folder=folder)) for folder in folders] for _ in range(2))
    cold = min(colds, key=sum)
    for name, (importing, calling, compiling) in (("cold", cold), ("warm", min(warms, key=sum))):
        print(f"{name}: import {importing:.2f} s, first result {calling:.2f} s more, of which compilation {compiling:.2f} s")
    assert cold[1] <= 8 and 0 < cold[2] <= 6
    assert min(importing + calling for importing, calling, _ in warms) <= 1.5 and not any(seconds for *_, seconds in warms)
