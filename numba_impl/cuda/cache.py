"""Compiled kernels are kept on disk: a process need not compile what another one has compiled.

A file holds the code of one kernel. Its name is a hash of all that decides the code: every source of the package, what compiles
them, the driver, the GPU's compute capability, and what the kernel was built from. Nothing else is seen: if you patch a constant
at run time, set ``NUMBA_CACHE_DIR`` to /dev/null, where nothing can be kept.

Code from a file runs with the user's rights, so no file is read that others own or can write. A file is written aside and moved
to its place: processes that compile the same kernel at once, or are killed, leave a whole file or none. The file begins with a
digest. A kernel is compiled again if its file has changed, or if the driver refuses the code.

Where nothing can be kept, each process compiles, and one line of the logger "numba_impl" says why. It is no Python warning:
``-W error`` would make it the failure of a call that is right.

Why this is not ``cuda.core.utils.FileStreamProgramCache``: that returns whatever lies at a path, also what another user wrote or
a fault changed, and keeps the path to itself, so that its caller cannot check the owner either (cuda-core 1.2.2). It came with
cuda-core 1.0, while numba-cuda takes 0.5.1. It would save some 20 lines.
"""

import contextlib
import functools
import hashlib
import logging
import os
import sys
import tempfile
import time
from pathlib import Path

LIMIT = 64 * 2**20  # bytes of all files together
PACKAGES = "numba", "numba-cuda", "llvmlite", "cuda-bindings", "cuda-core"
LIBRARIES = "nvvm", "nvJitLink"
DRIVER = Path("/proc/driver/nvidia/version")  # the driver's release, on Linux; the driver itself tells the version of CUDA alone

_log = logging.getLogger("numba_impl")


def fetch(name, identity, compile, load):
    """Return ``load(code)``, with the code kept for ``identity``, or else the code that ``compile()`` gives, which is then kept.

    ``name`` is for the log. The repr of ``identity`` tells the kernel from all others of these sources; with None nothing is
    kept. Raises what ``compile`` raises, and what ``load`` raises of new code.
    """
    start = time.perf_counter()
    path = None if identity is None else _path(identity)
    kernel, how = path and _load_kept(path, load), "from the cache"
    if kernel is None:
        code, how = compile(), "compiled"
        kernel = load(code)
        if path:
            _keep(path, code)
    _log.info("%s: %s in %.2f s", name, how, time.perf_counter() - start)
    return kernel


def folder() -> Path:
    """Make the directory of the kernels, unless it exists: below the one that Numba is told, or else the user's.

    Raises OSError or RuntimeError where it cannot be made, or others own it or can write it.
    """
    told = os.environ.get("NUMBA_CACHE_DIR") or os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    path = Path(told).expanduser() / "numba_impl"
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not _private(path.stat()):
        raise OSError(f"others own {path} or can write it")
    return path


def _private(status: os.stat_result) -> bool:
    """Whether the user owns it and nobody else can write it. Windows has no such modes: there it always is."""
    return sys.platform == "win32" or (status.st_uid == os.geteuid() and not status.st_mode & 0o022)


def _path(identity) -> Path | None:
    """Return the kernel's file, in a directory that exists; None, after a note, where nothing can be kept."""
    try:
        if not IMPORTED or _sources() != IMPORTED:
            raise OSError("the package's sources are not those that this process has imported")
        return folder() / hashlib.sha256(repr((IMPORTED, _toolchain(), identity)).encode()).hexdigest()
    except (ImportError, OSError, RuntimeError) as error:
        _note(f"numba_impl keeps no compiled kernels: {error}")
        return None


def _sources() -> str:
    """Hash every source of the package; empty where there are none to read."""
    root = Path(__file__).parents[1]
    try:
        sources = [(str(path.relative_to(root)), path.read_bytes()) for path in sorted(root.rglob("*.py"))]
    except OSError:
        return ""
    return hashlib.sha256(repr(sources).encode()).hexdigest() if sources else ""


IMPORTED = _sources()  # the package imports this module before all others, so that an edit since then shows


@functools.cache
def _toolchain():
    """Collect what makes code of the sources: Python, packages, CUDA's libraries, the driver, and Numba's settings."""
    from importlib import metadata

    from cuda import pathfinder
    from cuda.bindings import driver

    packages = [metadata.version(name) for name in PACKAGES]
    # NVVM does not tell its release, its file does.
    files = [os.stat(pathfinder.load_nvidia_dynamic_lib(name).abs_path or "") for name in LIBRARIES]
    libraries = [(status.st_size, status.st_mtime_ns) for status in files]
    release = DRIVER.read_text() if DRIVER.exists() else ""
    settings = sorted(item for item in os.environ.items() if item[0].startswith("NUMBA_") and item[0] != "NUMBA_CACHE_DIR")
    return sys.version, packages, libraries, driver.cuDriverGetVersion(), release, settings


def _load_kept(path, load):
    """Return ``load(code)`` of the file's code; None if the file is missing, changed or not the user's own, or does not load."""
    try:
        with open(path, "rb") as file:
            if not _private(os.fstat(file.fileno())):
                _note(f"numba_impl does not read a compiled kernel: others own a file in {path.parent} or can write it")
                return None
            digest, code = file.read(hashlib.sha256().digest_size), file.read()
    except OSError:
        return None
    if digest == _digest(path, code):
        with contextlib.suppress(Exception):  # if the fault is not the file's, the new code raises it again
            return load(code)
    return None


def _digest(path, code) -> bytes:
    """Hash the code, and the file's name, which says which kernel it is."""
    return hashlib.sha256(path.name.encode() + code).digest()


def _keep(path, code):
    """Write the file, which only the user may read; note it if that fails."""
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent)
        try:
            with open(handle, "wb") as file:
                file.write(_digest(path, code) + code)
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
        _evict(path.parent)
    except OSError as error:
        _note(f"numba_impl keeps no compiled kernels in {path.parent}: {error.strerror}")


def _evict(folder):
    """Remove the files written first, until ``LIMIT`` bytes are left; those of killed processes go so too."""
    with contextlib.suppress(FileNotFoundError):  # another process evicts too
        total = 0
        for file in sorted(os.scandir(folder), key=lambda file: file.stat().st_mtime_ns, reverse=True):
            total += file.stat().st_size
            if total > LIMIT:
                os.unlink(file)


@functools.cache
def _note(text):
    """Log a line, once in a process."""
    _log.warning(text)
