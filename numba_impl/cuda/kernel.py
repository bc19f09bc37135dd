"""From torch tensors to a running kernel: compilation, loading, torch's current stream and device."""

import array
import contextlib
import functools
import gc
import struct
import threading

import torch
from cuda.bindings import driver
from cuda.core import Device, LaunchConfig, ObjectCode, Stream, launch
from numba import cuda
from numba.cuda import types

from numba_impl.cuda import cache
from numba_impl.cuda.device import SIMULATED
from numba_impl.errors import KernelError

_threads = threading.local()
_resident = []  # every kernel that was loaded: CUDA unloads one that nobody holds, though a graph may launch it or it may run
COMPILERS = "numba", "llvmlite", "cuda"  # the packages whose exceptions say that a kernel does not compile or load
FREE_SHARED_BYTES = 48 * 1024  # a block gets more only where the kernel asks for it


built = functools.cache  # decorator of a function that builds a kernel: for the same arguments the same one, in this process


class Kernel:
    """A kernel function with its signature and launch bounds: Numba compiles it at its first launch, CUDA launches it.

    The signature is of pointers, which take tensors, then of ints, or tuples of them, then of at most one tuple of fp32
    constants. ``blocks`` is how many blocks of ``threads`` a multiprocessor shall hold: it bounds the registers. A block has
    ``shared_bytes`` of dynamic shared memory. ``config`` is all that the function was built from, by which, and the package's
    sources, its code is kept on disk; None keeps it in memory alone.
    """

    def __init__(self, function, signature, threads, blocks, config=None, shared_bytes=0):
        self.function, self.signature = function, signature
        self.threads, self.blocks, self.config, self.shared_bytes = threads, blocks, config, shared_bytes
        self._loaded = {}  # device index -> cuda.core kernel
        self._lock = threading.Lock()

    def ptx(self, compute_capability):
        """PTX for a compute capability such as (9, 0)."""
        bounds = (self.threads, self.blocks)
        ptx, _ = cuda.compile_ptx(self.function, self.signature, cc=compute_capability, launch_bounds=bounds)
        return ptx

    def prepare(self, device, grid, *numbers) -> "Launch":
        """A launch of ``grid`` blocks on a device; ``numbers``: the first of the ints, or tuples of them."""
        return Launch(self, device, grid, numbers)

    def on(self, index):
        """The kernel on the current device, loaded once: what is kept on disk, or compiled now.

        Raises RuntimeError while a CUDA graph is captured, of which neither can be part; KernelError where it does not compile
        or load; OutOfMemoryError.
        """
        return self._loaded.get(index) or self._load(index)

    def _load(self, index):
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("the kernel is not compiled, and cannot be while a CUDA graph is captured: call it once before")
        with self._lock:
            if index not in self._loaded:
                name, load = self.function.__name__, functools.partial(_load_code, index)
                try:
                    loaded = cache.fetch(name, self._identity(index), self._compile, load)
                    if self.shared_bytes > FREE_SHARED_BYTES:
                        _allow_shared(loaded, index, self.shared_bytes)
                    _resident.append(loaded)
                    self._loaded[index] = loaded
                except Exception as error:
                    if not _is_installations(error):
                        raise
                    kind = torch.OutOfMemoryError if "OUT_OF_MEMORY" in str(error) else KernelError
                    raise kind(f"the kernel {name} cannot be compiled or loaded on cuda:{index}: {error}") from error
        return self._loaded[index]

    def _identity(self, index):
        """What tells its code for a device from that of all other kernels, or None."""
        if self.config is None:
            return None
        function, capability = self.function, torch.cuda.get_device_capability(index)
        return function.__module__, function.__qualname__, self.config, self.signature, self.threads, self.blocks, capability

    def _compile(self) -> bytes:
        """For the current device: the name that the kernel has in its cubin, a zero, the cubin."""
        with no_garbage_collection():
            compiled = cuda.jit(launch_bounds=(self.threads, self.blocks))(self.function).compile(self.signature)
        return compiled.entry_name.encode() + b"\0" + compiled._codelibrary.get_cubin().code


def _is_installations(error) -> bool:
    """Whether the compiler or the driver raised an exception, and not a caller's alarm or a lack of the host's memory."""
    origin = type(error).__module__.partition(".")[0]
    return origin in COMPILERS or origin == "builtins" and not isinstance(error, (MemoryError, TimeoutError))


@contextlib.contextmanager
def no_garbage_collection():
    """Of cycles: while Numba compiles it makes millions of objects that stay; looking through them is an eighth of its time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class Launch:
    """A kernel on a device, with its grid and some of its arguments: what decides them is looked at once, for many calls.

    cuda.core takes an int for any argument, whose low bytes are the value; other objects take it longer.
    """

    def __init__(self, kernel, device, grid, numbers):
        self._kernel, self._grid, self._numbers = kernel, grid, numbers
        self._loaded = None
        self._converted = (), ()  # the last constants and their bits
        if not SIMULATED:
            self._index, self._flat_numbers = device.index, tuple(_flat(numbers))
            self._config = LaunchConfig(grid=grid, block=kernel.threads, shmem_size=kernel.shared_bytes)

    def __call__(self, arrays, numbers=(), constants=()):
        """Launch on torch's current stream: tensors on the device, ints that are left or one tuple of them, constants."""
        if SIMULATED:
            self._simulate(arrays, numbers, constants)
            return
        known, bits = self._converted
        if constants is not known:
            bits = _bits(constants)
            self._converted = constants, bits
        left = numbers[0] if numbers and type(numbers[0]) is tuple else numbers
        self._start([*[a.data_ptr() for a in arrays], *self._flat_numbers, *left, *bits])

    def _start(self, values):
        if torch.cuda.current_device() != self._index:
            with torch.cuda.device(self._index):
                self._start(values)
            return
        _bind(self._index)
        if self._loaded is None:
            self._loaded = self._kernel.on(self._index)
        launch(_stream(torch._C._cuda_getCurrentRawStream(self._index)), self._config, self._loaded, *values)

    def _simulate(self, arrays, numbers, constants):
        kernel, flat = self._kernel, list(map(_flat_array, arrays, self._kernel.signature.args))
        tuples = [constants] if len(kernel.signature.args) > len(flat) + len(self._numbers) + len(numbers) else []
        cuda.jit(kernel.function)[self._grid, kernel.threads, 0, kernel.shared_bytes](*flat, *self._numbers, *numbers, *tuples)


def _flat_array(tensor, pointer):
    """NumPy's of the memory from a tensor's first element to its last; as integers where the kernel takes those."""
    extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride())) if tensor.numel() else 0
    flat = tensor.detach().as_strided((extent,), (1,))
    return (flat.view(torch.int16) if pointer.dtype == types.int16 else flat).numpy()


def _bits(constants):
    """fp32 numbers as ints of the same bits; what fp32 does not hold is infinite, as in C."""
    return struct.unpack(f"{len(constants)}i", array.array("f", constants))


def _flat(numbers):
    """The numbers, tuples of them taken apart, as ints."""
    for number in numbers:
        if isinstance(number, tuple):
            yield from map(int, number)
        else:
            yield int(number)


def _load_code(index, code):
    """The cuda.core kernel of what ``Kernel._compile`` gave, on a device, the current one."""
    name, _, cubin = code.partition(b"\0")
    kernel = ObjectCode.from_cubin(cubin).get_kernel(name.decode())
    # CUDA would put off loading it until its first launch; what it is asked for makes it load now, and fail here.
    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_NUM_REGS
    status, _ = driver.cuKernelGetAttribute(attribute, driver.CUkernel(int(kernel.handle)), driver.CUdevice(index))
    if status != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(status.name)
    return kernel


def _bind(index):
    """Give this thread a CUDA context, once: torch's runtime makes one when it needs it, the driver's own calls do not."""
    if not hasattr(_threads, "bound"):
        Device(index).set_current()
        _threads.bound = True


@functools.lru_cache(maxsize=64)
def _stream(handle):
    return Stream.from_handle(handle)


def _allow_shared(kernel, device, size):
    """Let blocks have ``size`` bytes of dynamic shared memory, which CUDA wants to be asked for."""
    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    (status,) = driver.cuKernelSetAttribute(attribute, size, driver.CUkernel(int(kernel.handle)), driver.CUdevice(device))
    if status != driver.CUresult.CUDA_SUCCESS:
        raise KernelError(f"{size} bytes of shared memory a block refused on cuda:{device}: {status.name}")
