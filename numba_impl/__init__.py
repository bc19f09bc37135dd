"""Fused ConvTranspose2d + Mish + Add + Hardtanh + Scale, as Numba kernels on PyTorch tensors.

The layers, from the top; each imports from those below alone, and a backend from no other backend:

    __main__            python -m numba_impl COMMAND
    doctor              what is wrong with an installation
    warm                kernels compiled ahead
    oracle              what float64 says of a result, and how far from it a result may be
    case                the sizes of a call, and operands of these sizes
    functional          the layer and its activation as functions of tensors
    autograd            the layer as torch operators: gradients, torch.compile, torch.export
    exchange            arrays of other libraries
    dispatch            which backend serves a problem, and why; the plans
    backends            the table of backends
    backends.hopper     CUDA: the fused kernel on Hopper's tensor cores
    backends.tiled      CUDA: the fused kernel on any GPU
    backends.composite  CUDA: torch's convolution, then the epilogue as a kernel
    backends.cpu        CPU: torch's convolution, then the epilogue in one parallel pass
    backends.reference  plain PyTorch: the truth, and what serves the rest
    backends.base       what a backend and a plan are
    arguments           what users pass, checked, as a problem
    convolution         torch's own convolution
    gpu                 facts about a device
    problem             operands, geometry, parity algebra
    epilogue            the activation, its gradient, and the table of them
    cuda                what all kernels share: compiling, launching, shared memory, pipelines, PTX
    errors              a kernel that does not compile or load
"""

import numba_impl.cuda.cache  # noqa: F401 - before the sources whose state it records
from numba_impl.autograd import decompositions
from numba_impl.functional import conv_transpose2d_mish_add_hardtanh_scale, mish_add_hardtanh_scale

__all__ = ["conv_transpose2d_mish_add_hardtanh_scale", "decompositions", "mish_add_hardtanh_scale"]
