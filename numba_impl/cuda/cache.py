"""Compiled kernels on disk, so that a process need not compile what another one has.

A file holds one kernel's code. Its name is a hash of all that decides the code: every source of the package, what compiles
them, the driver, the GPU's compute capability, and what the kernel was built from. Nothing else is seen: who patches a
constant at run time sets ``NUMBA_CACHE_DIR`` to /dev/null, where nothing is kept.

Code from a file runs with the user's rights, so nothing is read that others own or can write. A file is written aside and
moved to its place: processes that compile the same at once, or are killed, leave a whole one or none. It begins with a
digest, so that one that has changed is compiled again, as is one that the driver refuses.

Where nothing can be kept, each process compiles, and one line says why. It goes to the logger "numba_impl", which writes to
stderr unless it is told otherwise; ``-W error`` would turn a Python warning into the failure of a call that is right.
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
DRIVER = Path("/proc/driver/nvidia/version")  # its release, on Linux; the version that it tells itself is CUDA's

_log = logging.getLogger("numba_impl")


def fetch(name, identity, compile, load):
    """``load(code)`` of the code kept for ``identity``, or else of what ``compile()`` gives, which is kept from then on.

    ``name`` is for the log. ``identity``: what tells the kernel from all others of these sources, by its repr; None keeps
    nothing. Raises what ``compile`` raises, and ``load`` of new code.
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


def place() -> Path:
    """Where kernels are kept: below the directory that Numba is told, or else the user's. Raises RuntimeError without a home."""
    told = os.environ.get("NUMBA_CACHE_DIR") or os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(told).expanduser() / "numba_impl"


def folder() -> Path:
    """``place()``, made if it is missing. Raises OSError or RuntimeError where it cannot be, or others own it or can write it."""
    path = place()
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not private(path.stat()):
        raise OSError(f"others own {path} or can write it")
    return path


def private(status: os.stat_result) -> bool:
    """Whether a file or directory is the user's own and no other can write it; on Windows, whose modes do not tell, True."""
    return sys.platform == "win32" or (status.st_uid == os.geteuid() and not status.st_mode & 0o022)


def _path(identity) -> Path | None:
    """The file for a kernel, in a directory that is there; None, and a note, where nothing can be kept."""
    try:
        if not IMPORTED or _sources() != IMPORTED:
            raise OSError("the package's sources are not those that this process has imported")
        return folder() / hashlib.sha256(repr((IMPORTED, _toolchain(), identity)).encode()).hexdigest()
    except (ImportError, OSError, RuntimeError) as error:
        _note(f"numba_impl keeps no compiled kernels: {error}")
        return None


def _sources() -> str:
    """A hash of every source of the package; empty where there are none to read."""
    root = Path(__file__).parent
    try:
        sources = [(str(path.relative_to(root)), path.read_bytes()) for path in sorted(root.rglob("*.py"))]
    except OSError:
        return ""
    return hashlib.sha256(repr(sources).encode()).hexdigest() if sources else ""


IMPORTED = _sources()  # the package imports this module before all others, so that an edit since then shows


@functools.cache
def _toolchain():
    """What makes code of the sources: Python, packages, CUDA's libraries, the driver, and Numba's settings."""
    from importlib import metadata

    from cuda import pathfinder
    from cuda.bindings import driver

    packages = [metadata.version(name) for name in PACKAGES]
    # By their files, as NVVM does not tell its release.
    files = [os.stat(pathfinder.load_nvidia_dynamic_lib(name).abs_path or "") for name in LIBRARIES]
    libraries = [(status.st_size, status.st_mtime_ns) for status in files]
    release = DRIVER.read_text() if DRIVER.exists() else ""
    settings = sorted(item for item in os.environ.items() if item[0].startswith("NUMBA_") and item[0] != "NUMBA_CACHE_DIR")
    return sys.version, packages, libraries, driver.cuDriverGetVersion(), release, settings


def _load_kept(path, load):
    """``load(code)`` of the code kept there; None where there is none, or not as it was written, or it does not load."""
    code = _read(path)
    if code is not None:
        with contextlib.suppress(Exception):  # where the fault is not the file's, new code raises it again
            return load(code)
    return None


def _read(path) -> bytes | None:
    try:
        with open(path, "rb") as file:
            if not private(os.fstat(file.fileno())):
                _note(f"numba_impl does not read a compiled kernel: others own a file in {path.parent} or can write it")
                return None
            digest, code = file.read(hashlib.sha256().digest_size), file.read()
    except OSError:
        return None
    return code if digest == _digest(path, code) else None


def _digest(path, code) -> bytes:
    """Of the code, and of the name that says which it is."""
    return hashlib.sha256(path.name.encode() + code).digest()


def _keep(path, code):
    """Write the file, with the user's rights alone; a note where that fails."""
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
    """Remove what was written first, until ``LIMIT`` is kept; what a killed process left goes so too."""
    with contextlib.suppress(FileNotFoundError):  # another process is at it
        total = 0
        for file in sorted(os.scandir(folder), key=lambda file: file.stat().st_mtime_ns, reverse=True):
            total += file.stat().st_size
            if total > LIMIT:
                os.unlink(file)


@functools.cache
def _note(text):
    """Once in a process."""
    _log.warning(text)
