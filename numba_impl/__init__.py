"""Fused ConvTranspose2d + Mish + Add + Hardtanh + Scale, as Numba kernels on PyTorch tensors.

The layers, from the top; each imports only from below:

    fuzz                drawn calls against float64: python -m numba_impl.fuzz
    doctor              what is wrong with an installation: python -m numba_impl doctor
    warm                kernels compiled ahead: python -m numba_impl warm
    functional          the layer and its activation as functions of tensors
    ops                 the layer as a torch operator: autograd, torch.compile, torch.export
    dispatch            which backend serves a call, and why; plans, remembered for calls of a kind
    backend_hopper      CUDA: the fused kernel on Hopper's tensor cores
    backend_tiled       CUDA: the fused kernel on any GPU
    backend_composite   CUDA: torch's convolution, then the pointwise kernel
    backend_cpu         CPU: torch's convolution, then the epilogue in one parallel pass
    reference           plain PyTorch: the truth, and what serves the rest
    cuda_support        whether a call and an installation suit the CUDA backends
    kernels/hopper      parity-split transposed convolution by wgmma, epilogue fused
    kernels/plain       its units that do not fit into fp16, in fp32
    kernels/products    its matrix products, in straight line
    kernels/split       its weights, scaled and split into fp16
    kernels/tiles       which tile the tiled kernel uses, and whether it pays
    kernels/tiled       parity-split, shared-memory tiled transposed convolution, epilogue fused
    kernels/pointwise   the epilogue alone
    kernels/pointwise_backward   its gradient
    kernels/channel_sum the gradient of a bias
    launch              compilation, torch's stream and device, array exchange
    cache               compiled kernels on disk
    kernels/ptx         instructions that Numba lacks
    kernels/device      inlining and unrolling
    tensor_map          how the bulk copy engine is told of a tensor
    fragments           which thread of the tensor-core kernel holds which element
    scaling             which power of two brings its rows into fp16's range
    packing             weights in the kernels' layouts
    epilogue            the scalar maths, once for every target
    problem             geometry, parity algebra, checks of every argument
    errors              a kernel that does not compile or load
"""

import numba_impl.cuda.cache  # noqa: F401 - before the sources whose state it records
from numba_impl.functional import conv_transpose2d_mish_add_hardtanh_scale, mish_add_hardtanh_scale

__all__ = ["conv_transpose2d_mish_add_hardtanh_scale", "mish_add_hardtanh_scale"]
