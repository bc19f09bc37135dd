"""From torch tensors to a running kernel: array exchange, compilation, current stream and device."""

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
FREE_SHARED_BYTES = 48 * 1024  # a block gets more only where the kernel asks for it


def as_tensor(array):
    """A tensor over the memory of ``array``: a tensor, or anything with ``__cuda_array_interface__``.

    Work that the interface's stream entry names is waited for on torch's current stream. In the
    simulator, CPU tensors and NumPy arrays stand for device arrays.
    """
    if isinstance(array, torch.Tensor):
        return array
    if SIMULATED:
        return torch.as_tensor(array)
    interface = array.__cuda_array_interface__
    tensor = torch.as_tensor(array, device="cuda")
    if handle := interface.get("stream"):
        legacy = handle == 1  # the interface's number for it; torch takes no such handle
        stream = torch.cuda.default_stream(tensor.device) if legacy else torch.cuda.ExternalStream(handle, tensor.device)
        torch.cuda.current_stream(tensor.device).wait_stream(stream)
    return tensor


def fp32(name, array):
    """``as_tensor(array)``; raises TypeError unless it is fp32."""
    tensor = as_tensor(array)
    if tensor.dtype != torch.float32:
        raise TypeError(f"{name} must be torch.float32, got {tensor.dtype}")
    return tensor


def contiguous(name, array):
    """``fp32(name, array)``; raises ValueError unless it is contiguous."""
    tensor = fp32(name, array)
    if not tensor.is_contiguous():
        raise ValueError(f"{name} must be contiguous, got shape {tuple(tensor.shape)} with strides {tensor.stride()}")
    return tensor


class Kernel:
    """A kernel function with its signature and launch bounds: Numba compiles it at its first launch, CUDA launches it.

    ``blocks`` is how many blocks of ``threads`` a multiprocessor shall hold: it bounds the registers. ``config`` is all that
    the function was built from, by which, and the package's sources, its code is kept on disk; None keeps it in memory alone.
    Pointers in the signature take tensors, whose addresses cost less than an array interface; tuples take tuples.
    """

    def __init__(self, function, signature, threads, blocks, config=None):
        self.function, self.signature = function, signature
        self.threads, self.blocks, self.config = threads, blocks, config
        self._loaded = {}  # device index -> cuda.core kernel
        self._lock = threading.Lock()

    def ptx(self, compute_capability):
        """PTX for a compute capability such as (9, 0)."""
        bounds = (self.threads, self.blocks)
        ptx, _ = cuda.compile_ptx(self.function, self.signature, cc=compute_capability, launch_bounds=bounds)
        return ptx

    def __call__(self, grid, *args, shared_bytes=0):
        """Launch ``grid`` blocks on the device of the first argument, a tensor, and on torch's current stream."""
        if SIMULATED:
            arrays = [a.detach().as_strided((a.numel(),), (1,)).numpy() if isinstance(a, torch.Tensor) else a for a in args]
            cuda.jit(self.function)[grid, self.threads, 0, shared_bytes](*arrays)
            return
        values = [convert(value) for convert, value in zip(self._converters, _flat(args, tuple))]
        self.prepare(args[0].device, grid, shared_bytes=shared_bytes).start(values)

    def prepare(self, device, grid, *numbers, shared_bytes=0):
        """A ``Launch`` of ``grid`` blocks on a device, for a kernel of arrays, then ints, then a tuple of fp32 constants.

        ``numbers``: the first of the ints, or tuples of them. The kernel is compiled and loaded, if it is not yet.
        """
        return _remembered_launch(self, device, grid, numbers, shared_bytes)

    @functools.cached_property
    def _converters(self):
        """What turns each argument, and each member of a tuple, into a value for the driver."""
        scalars = {types.int32: int, types.int64: int, types.boolean: int, types.float32: lambda value: _bits([value])[0]}
        return [scalars.get(kind, torch.Tensor.data_ptr) for kind in _flat(self.signature.args, types.UniTuple)]

    def _load(self, index):
        """Load on the current device, once, what is kept on disk or compiled now; neither can be part of a CUDA graph."""
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("the kernel is not compiled, and cannot be while a CUDA graph is captured: call it once before")
        with self._lock:
            if index not in self._loaded:
                name, load = self.function.__name__, functools.partial(_load_code, index)
                try:
                    self._loaded[index] = cache.fetch(name, self._identity(index), self._compile, load)
                    _resident.append(self._loaded[index])
                except Exception as error:
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

    def __init__(self, kernel, device, grid, numbers, shared_bytes):
        self._kernel, self._grid, self._numbers, self._shared_bytes = kernel, grid, numbers, shared_bytes
        if not SIMULATED:
            self._index, self._flat_numbers = device.index, tuple(map(int, _flat(numbers, tuple)))
            self._config = LaunchConfig(grid=grid, block=kernel.threads, shmem_size=shared_bytes)
            self._loaded = self._on_device(self._load)
            self._converted = (), ()  # the last constants and their bits

    def __call__(self, arrays, numbers=(), constants=()):
        """Launch on torch's current stream: tensors on the device, the ints that are left, or tuples of them, the constants."""
        if SIMULATED:
            tuples = [constants] if constants else []
            self._kernel(self._grid, *arrays, *self._numbers, *numbers, *tuples, shared_bytes=self._shared_bytes)
            return
        known, bits = self._converted
        if constants is not known:
            bits = _bits(constants)
            self._converted = constants, bits
        self.start([*[a.data_ptr() for a in arrays], *self._flat_numbers, *_flat(numbers, tuple), *bits])

    def start(self, values):
        """Launch with the kernel's arguments as ints: addresses, and fp32 by its bits."""
        if torch.cuda.current_device() == self._index:
            _bind(self._index)
            launch(_stream(torch._C._cuda_getCurrentRawStream(self._index)), self._config, self._loaded, *values)
        else:
            self._on_device(lambda: self.start(values))

    def _on_device(self, function):
        with torch.cuda.device(self._index):
            return function()

    def _load(self):
        _bind(self._index)
        kernel = self._kernel._loaded.get(self._index) or self._kernel._load(self._index)
        if self._shared_bytes > FREE_SHARED_BYTES:
            _allow_shared(kernel, self._index, self._shared_bytes)
        return kernel


_remembered_launch = functools.lru_cache(maxsize=1024)(Launch)


def _bits(constants):
    """fp32 numbers as ints of the same bits; what fp32 does not hold is infinite, as in C."""
    return struct.unpack(f"{len(constants)}i", array.array("f", constants))


def _flat(values, nested):
    """The values, those of kind ``nested`` taken apart."""
    for value in values:
        if isinstance(value, nested):
            yield from value
        else:
            yield value


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


@functools.lru_cache
def _allow_shared(kernel, device, size):
    """Let blocks have ``size`` bytes of dynamic shared memory, which CUDA wants to be asked for."""
    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    (status,) = driver.cuKernelSetAttribute(attribute, size, driver.CUkernel(int(kernel.handle)), driver.CUdevice(device))
    if status != driver.CUresult.CUDA_SUCCESS:
        raise KernelError(f"{size} bytes of shared memory a block refused on cuda:{device}: {status.name}")


@functools.lru_cache
def multiprocessors(device):
    """Multiprocessors of a CUDA device; one in the simulator."""
    return 1 if SIMULATED else torch.cuda.get_device_properties(device).multi_processor_count
