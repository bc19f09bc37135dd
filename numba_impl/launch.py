"""From torch tensors to a running kernel: array exchange, compilation, current stream and device."""

import functools
import threading

import torch

from numba import cuda
from numba_impl.kernels.device import SIMULATED

FREE_SHARED_BYTES = 48 * 1024  # a block gets more only where the kernel asks for it


def as_tensor(array):
    """A tensor over the memory of ``array``: a tensor, or anything with ``__cuda_array_interface__``.

    Work that the interface's stream entry names is waited for on torch's current stream. In the
    simulator, CPU tensors and NumPy arrays stand for device arrays.
    """
    if isinstance(array, torch.Tensor):
        return array.detach()
    if SIMULATED:
        return torch.as_tensor(array)
    interface = array.__cuda_array_interface__
    tensor = torch.as_tensor(array, device="cuda")
    if interface.get("stream"):
        stream = torch.cuda.ExternalStream(interface["stream"], tensor.device)
        torch.cuda.current_stream(tensor.device).wait_stream(stream)
    return tensor


def _pointer(value):
    """The kernel's view of an argument: a tensor's address (a flat array in the simulator), scalars as they are."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.numpy().reshape(-1) if SIMULATED else value.data_ptr()


class Kernel:
    """A kernel function with its signature and launch bounds, compiled at its first launch.

    ``blocks`` is how many blocks of ``threads`` a multiprocessor shall hold: it bounds the registers.
    """

    def __init__(self, function, signature, threads, blocks):
        self.function, self.signature = function, signature
        self.threads, self.blocks = threads, blocks
        self._lock = threading.Lock()

    def ptx(self, compute_capability):
        """PTX for a compute capability such as (9, 0)."""
        bounds = (self.threads, self.blocks)
        ptx, _ = cuda.compile_ptx(self.function, self.signature, cc=compute_capability, launch_bounds=bounds)
        return ptx

    @functools.cached_property
    def _compiled(self):
        return cuda.jit(launch_bounds=(self.threads, self.blocks))(self.function).compile(self.signature)

    def __call__(self, grid, *args, shared_bytes=0):
        """Launch ``grid`` blocks on the device of the first tensor, on torch's current stream."""
        if SIMULATED:
            cuda.jit(self.function)[grid, self.threads, 0, shared_bytes](*map(_pointer, args))
            return
        from cuda.core import Stream

        device = args[0].device
        with torch.cuda.device(device):
            with self._lock:
                compiled = self._compiled
            if shared_bytes > FREE_SHARED_BYTES:
                _allow_shared(compiled, device.index, shared_bytes)
            stream = Stream.from_handle(torch.cuda.current_stream().cuda_stream)
            compiled.launch(tuple(map(_pointer, args)), (grid, 1, 1), (self.threads, 1, 1), stream, shared_bytes)


@functools.lru_cache
def _allow_shared(compiled, device, size):
    """Let blocks of a compiled kernel have ``size`` bytes of dynamic shared memory; numba-cuda does not ask."""
    from cuda.bindings import driver

    handle = driver.CUkernel(int(compiled._codelibrary.get_cufunc().kernel.handle))
    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    (status,) = driver.cuKernelSetAttribute(attribute, size, handle, driver.CUdevice(device))
    if status != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"{size} bytes of shared memory a block refused on cuda:{device}: {status.name}")


def multiprocessors(device):
    """Multiprocessors of a CUDA device; one in the simulator."""
    return 1 if SIMULATED else torch.cuda.get_device_properties(device).multi_processor_count
