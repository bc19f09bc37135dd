"""Arrays of other libraries as torch tensors over the same memory, by ``__cuda_array_interface__``: CuPy's, Numba's.

The interface may name the stream on which the memory is written and read. Torch's current stream waits for it before our work,
and it for torch's after, so that neither library overtakes the other.
"""

from contextlib import contextmanager
from typing import Any, Protocol

import torch

LEGACY = 1  # the interface's number for the legacy default stream; torch takes no such handle


class CudaArray(Protocol):
    """An array on a GPU, of whatever library."""

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]: ...


@contextmanager
def as_tensors(**arrays):
    """Context of the tensors over ``arrays``, in order: tensors and no bias stay, others have ``__cuda_array_interface__``.

    Raises TypeError, naming the argument, for anything else.
    """
    found, producers = [], []
    for name, array in arrays.items():
        if isinstance(array, torch.Tensor) or array is None and name == "bias":
            found.append(array)
            continue
        interface = getattr(array, "__cuda_array_interface__", None)
        if interface is None:
            raise TypeError(f"{name} must be a torch.Tensor or have __cuda_array_interface__, got {type(array).__name__}")
        tensor = torch.as_tensor(array, device=_device(interface))
        found.append(tensor)
        if handle := interface.get("stream"):
            device = tensor.device
            legacy = torch.cuda.default_stream(device)
            producers.append((device, legacy if handle == LEGACY else torch.cuda.ExternalStream(handle, device)))
    for device, producer in producers:
        torch.cuda.current_stream(device).wait_stream(producer)
    yield found
    for device, producer in producers:
        producer.wait_stream(torch.cuda.current_stream(device))


def _device(interface) -> torch.device:
    """The device of the memory; the current one where there is none."""
    from cuda.bindings import driver

    attribute = driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
    status, index = driver.cuPointerGetAttribute(attribute, interface["data"][0])
    return torch.device("cuda", index if status == driver.CUresult.CUDA_SUCCESS else torch.cuda.current_device())
